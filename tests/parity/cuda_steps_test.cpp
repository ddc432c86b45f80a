// The steps of the CUDA back end one by one against those of the CPU back end: the lines that rank 0 of two writes at a
// peer, what it makes of the peer's partials, and what it answers to the peer's rows. The peer is played by the test,
// so that both sides of every step can be seen.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "tests/support/played_peer.h"
#include "tests/support/synthetic.h"

namespace moed {
namespace {

using test::Image;
using test::Job;
using test::LaneAt;
using test::line_at;
using test::PlayedPeer;
using test::PlayedWorld;
using test::SyntheticModel;

constexpr uint32_t kPiece = 16;

/// The shapes of cases.h that two ranks can share.
std::vector<CaseShape> shapes_for_two() {
  std::vector<CaseShape> all = case_shapes();
  std::erase_if(all, [](const CaseShape& c) { return c.shape.experts < 2; });
  return all;
}

/// Tokens [done, done + tokens) of a job as a call of one lane. to: by rank.
void dispatch_on_cpu(const LaneAt& at, const Job& job, uint32_t done, uint32_t tokens,
                     const std::vector<Destination>& to) {
  const Shape& s = at.shape;
  const bool wire = (job.flags & kFlagWire) != 0;
  const auto* x =
      wire ? reinterpret_cast<const std::byte*>(job.codes.data()) : reinterpret_cast<const std::byte*>(job.x.data());
  std::vector<float> weights = job.weights;
  if ((job.flags & kFlagWeights16) != 0)
    for (float& w : weights) w = bf16_to_float(float_to_bf16(w));
  const auto* scales = reinterpret_cast<const std::byte*>(job.scales.data());
  cpu::dispatch({.shape = &s,
                 .layout = &at.layout,
                 .ranks = 2,
                 .lane = at.lane,
                 .layer = job.layer,
                 .tokens = tokens,
                 .wire = wire,
                 .x = x + uint64_t{done} * s.latent * (wire ? 1 : 2),
                 .scales = wire ? scales + uint64_t{done} * (s.latent / kBlock) : nullptr,
                 .ids = job.ids.data() + uint64_t{done} * s.top_k,
                 .weights = weights.data() + uint64_t{done} * s.top_k,
                 .to = to});
}

/// Calls of rank 0 on lane 1, of which the peer serves what lies with it.
class Caller {
 public:
  enum class Partials { any_bits, normal };

  Caller(PlayedWorld& world, const Shape& shape, const ModelWeights& model)
      : world_(world),
        peer_(world.peer()),
        m_(peer_.layout()),
        shape_(shape),
        model_(model),
        want_(peer_.incoming()),
        own_(test::empty_image(m_)) {}

  /// One call, piece by piece. Empty, or the first thing that is not as the CPU has it.
  std::string run(const Job& job, Partials partials) {
    const Call call = world_.engine().lay_out(job);
    const uint32_t valid = job.valid ? std::min(static_cast<uint32_t>(*job.valid), call.tokens) : call.tokens;
    std::vector<uint16_t> want(uint64_t{call.tokens} * shape_.latent, 0);
    world_.engine().submit(call);
    for (uint32_t done = 0; done == 0 || done < valid; done += kPiece) {
      const std::string why = piece(job, done, std::min(valid - done, kPiece), partials, want);
      if (!why.empty()) return "piece from token " + std::to_string(done) + ": " + why;
    }
    Reply reply{};
    if (!world_.engine().wait(reply)) return "the call does not end";
    if (test::status_of(reply) != Status::ok) return std::string("the call ends ") + name(test::status_of(reply));
    peer_.pull();
    if (std::string why = test::first_difference(m_, peer_.incoming(), want_); !why.empty())
      return "after the call: " + why;
    const bool normed = (job.flags & kFlagNoNorm) == 0 && shape_.reduce == Reduce::sum_rmsnorm;
    return test::first_difference(world_.engine().out(call), want, shape_.latent, normed ? kNormUlps : 0);
  }

 private:
  std::string piece(const Job& job, uint32_t done, uint32_t tokens, Partials partials, std::vector<uint16_t>& out) {
    const uint64_t own = sequence(1, ++count_);
    const uint64_t q = sequence(PlayedPeer::kSession, count_);
    dispatch_on_cpu({shape_, m_, 1}, job, done, tokens, {{test::bytes_of(own_), own}, {test::bytes_of(want_), q}});
    if (CallLine line; load_line(line_at(want_, m_.call(1)), &line, sizeof line, q) == Seen::same) {
      if (std::string why = peer_.await(test::question_runs(m_, 1, line), q); !why.empty()) return why;
      if (std::string why = test::first_difference(m_, peer_.incoming(), want_); !why.empty()) return why;
      answer(line, q, partials);
    }
    if (load_sequence(line_at(own_, m_.call(1))) == own) test::serve_on_cpu({shape_, m_, 1}, model_, own, own_, own_);
    const LayerWeights* weights = layer_weights(model_, shape_, job.layer);
    const std::vector<Destination> from = {{test::bytes_of(own_), own}, {test::bytes_of(peer_.outgoing()), q}};
    uint32_t culprit = 0;
    const bool whole = cpu::reduce({.shape = &shape_,
                                    .layout = &m_,
                                    .ranks = 2,
                                    .lane = 1,
                                    .tokens = tokens,
                                    .norm = (job.flags & kFlagNoNorm) == 0 && shape_.reduce == Reduce::sum_rmsnorm,
                                    .ids = job.ids.data() + uint64_t{done} * shape_.top_k,
                                    .gamma = weights == nullptr ? nullptr : weights->norm.data(),
                                    .from = from,
                                    .out = out.data() + uint64_t{done} * shape_.latent},
                                   culprit);
    return whole ? "" : "the test itself lacks partials of rank " + std::to_string(culprit);
  }

  /// Partials of the test's own making, and the return line.
  void answer(const CallLine& line, uint64_t q, Partials kind) {
    uint32_t rows = 0;
    std::vector<uint16_t> partial(shape_.latent);
    for (uint32_t t = 0; t < line.tokens; ++t) {
      if (!test::has_row(line, t)) continue;
      ++rows;
      for (uint16_t& v : partial)
        v = kind == Partials::any_bits ? static_cast<uint16_t>(random_()) : oracle::bf16_bits(double{normal(random_)});
      store_record(&line_at(peer_.outgoing(), m_.partial(1, t)), partial.data(), partial.size() * 2, q);
    }
    const ReturnLine back{.rows = rows, .pass_rows = rows, .pass_sources = 1};
    store_line(line_at(peer_.outgoing(), m_.return_line(1)), &back, sizeof back, q);
    peer_.push();
  }

  PlayedWorld& world_;
  PlayedPeer& peer_;
  const SegmentLayout m_;
  const Shape shape_;
  const ModelWeights model_;
  Image want_, own_;  ///< what the peer's segment has to hold; rank 0's own segment
  std::mt19937_64 random_{11};
  uint64_t count_ = 0;  ///< of lane 1 of rank 0
};

/// Rows of a case as a job; in wire format codes and scales are any bytes.
Job job_of_form(const oracle::Rows& rows, uint32_t layer, uint32_t flags) {
  Job job = test::job_of(rows, layer, flags);
  if ((flags & kFlagWire) == 0) return job;
  std::mt19937_64 random(rows.x.size());
  job.codes.resize(rows.x.size());
  job.scales.resize(rows.x.size() / kBlock);
  for (uint8_t& b : job.codes) b = static_cast<uint8_t>(random());
  for (uint8_t& b : job.scales) b = static_cast<uint8_t>(random());
  job.x.clear();
  return job;
}

/// The peer's memory on rank 0's GPU, and again on another one.
class CudaSteps : public test::GpusTest {
 protected:
  static int peer_gpu() { return GetParam() - 1; }
};

TEST_P(CudaSteps, DispatchAndReduceOfEveryShapeRoutingAndForm) {
  constexpr uint32_t kForms[] = {0, kFlagIds64, kFlagWeights16, kFlagWire, kFlagIds64 | kFlagWeights16 | kFlagWire};
  for (const CaseShape& c : shapes_for_two()) {
    PlayedWorld world(c.shape, {}, 1, kPiece, peer_gpu());
    Caller caller(world, c.shape, {});
    uint32_t i = 0;
    for (const Routing routing : kRoutings)
      for (const uint32_t form : kForms) {
        const uint32_t tokens = std::vector<uint32_t>{c.tokens, kPiece, 37}[i % 3];
        const oracle::Rows rows = make_rows(routing, c.shape, 2, tokens, i);
        Job job = job_of_form(rows, i % 2 == 0 ? kIdentityLayer : 1, form | kFlagNoNorm);
        if (i % 4 == 3) job.valid = static_cast<int32_t>(tokens) - 2;
        const std::string what = std::string(c.name) + ", " + name(routing) + ", form " + std::to_string(form) + ", " +
                                 std::to_string(tokens) + " tokens";
        ASSERT_EQ(caller.run(job, Caller::Partials::any_bits), "") << what;
        job.flags = form;
        ASSERT_EQ(caller.run(job, Caller::Partials::normal), "") << what << ", with the norm";
        ++i;
      }
  }
}

/// A layer with norm weights; the rows all go to the peer, because real experts have no one set of bits.
TEST_P(CudaSteps, ReduceMultipliesByTheLayersNormWeights) {
  const Shape shape = make_shape(512, 256, 128, 32, 4);
  const SyntheticModel synthetic(shape, 7);
  ModelWeights model = synthetic.of_rank(0, 2);
  std::mt19937_64 random(3);
  for (uint32_t i = 0; i < shape.latent; ++i) model.layers[0].norm.push_back(oracle::bf16_bits(double{normal(random)}));
  PlayedWorld world(shape, model, 1, kPiece, peer_gpu());
  Caller caller(world, shape, model);
  for (uint32_t tokens = 1; tokens <= 40; ++tokens) {
    oracle::Rows rows = make_rows(Routing::masked, shape, 2, tokens, tokens);
    for (int32_t& id : rows.ids) id = id < 0 ? id : 16 + id % 16;
    ASSERT_EQ(caller.run(test::job_of(rows, 1, 0), Caller::Partials::normal), "") << tokens << " tokens";
  }
}

/// How many values that both back ends computed have the same bits.
struct Share {
  uint64_t equal = 0, all = 0;
};

/// Calls of the peer at rank 0, one on each lane at once.
class Asker {
 public:
  Asker(PlayedWorld& world, const Shape& shape, const ModelWeights& model)
      : peer_(world.peer()), m_(peer_.layout()), shape_(shape), model_(model), counts_(m_.lanes_all, 0) {}

  struct Question {
    uint32_t lane, layer;
    oracle::Rows rows;
  };

  /// Empty, or the first thing that is not as the CPU has it.
  std::string ask(const std::vector<Question>& questions, Share& share) {
    for (const Question& a : questions) {
      const uint64_t q = sequence(PlayedPeer::kSession, ++counts_[a.lane]);
      const auto tokens = static_cast<uint32_t>(a.rows.ids.size() / shape_.top_k);
      dispatch_on_cpu({shape_, m_, a.lane}, test::job_of(a.rows, a.layer, 0), 0, tokens,
                      {{test::bytes_of(peer_.outgoing()), q}, {}});
    }
    peer_.push();
    Image want = peer_.incoming();
    for (const Question& a : questions) {
      const std::string why = check(a, want, share);
      if (!why.empty()) return "lane " + std::to_string(a.lane) + ": " + why;
    }
    peer_.pull();
    return test::first_difference(m_, peer_.incoming(), want);
  }

 private:
  /// Adds to `want` what rank 0 has to write for one question. Times and the bits of experts are taken over from what
  /// it wrote, once they are found to be in order.
  std::string check(const Question& a, Image& want, Share& share) {
    const uint64_t q = sequence(PlayedPeer::kSession, counts_[a.lane]);
    CallLine line;
    if (load_line(line_at(peer_.outgoing(), m_.call(a.lane)), &line, sizeof line, q) != Seen::same) return "";
    if (std::string why = peer_.await(test::answer_runs(m_, a.lane, line), q); !why.empty()) return why;
    const Source source = test::serve_on_cpu({shape_, m_, a.lane}, model_, q, peer_.outgoing(), want);
    ReturnLine back;
    line_at(want, m_.return_line(a.lane)) = line_at(peer_.incoming(), m_.return_line(a.lane));
    load_payload(line_at(want, m_.return_line(a.lane)), &back, sizeof back);
    if (back.status != 0 || back.rows != source.rows || back.pass_rows < back.rows || back.pass_sources < 1)
      return "the return line says status " + std::to_string(back.status) + ", " + std::to_string(back.rows) +
             " rows of " + std::to_string(back.pass_rows) + " in a pass of " + std::to_string(back.pass_sources) +
             " sources, instead of status 0 and " + std::to_string(source.rows) + " rows";
    for (uint32_t t = 0; t < line.tokens && a.layer != kIdentityLayer; ++t) {
      if (!test::has_row(line, t)) continue;
      const std::string why = check_experts(m_.partial(a.lane, t), q, want, share);
      if (!why.empty()) return "partial of token " + std::to_string(t) + ": " + why;
    }
    return "";
  }

  std::string check_experts(uint64_t offset, uint64_t q, Image& want, Share& share) {
    std::vector<uint16_t> got(shape_.latent);
    std::vector<uint16_t> reference(shape_.latent);
    if (load_record(&line_at(peer_.incoming(), offset), got.data(), got.size() * 2, q) != Seen::same ||
        load_record(&line_at(want, offset), reference.data(), got.size() * 2, q) != Seen::same)
      return "not there";
    share.all += got.size();
    for (size_t i = 0; i < got.size(); ++i) share.equal += got[i] == reference[i] ? 1 : 0;
    store_record(&line_at(want, offset), got.data(), got.size() * 2, q);
    const Closeness c = compare_rows(got, reference, shape_.latent);
    return c.ok ? "" : c.text();
  }

  PlayedPeer& peer_;
  const SegmentLayout m_;
  const Shape shape_;
  const ModelWeights model_;
  std::vector<uint64_t> counts_;  ///< of the peer's lanes
};

TEST_P(CudaSteps, ServeOfEveryShapeAndRouting) {
  for (const CaseShape& c : shapes_for_two()) {
    const SyntheticModel synthetic(c.shape, 7);
    const ModelWeights model = synthetic.of_rank(0, 2);
    PlayedWorld world(c.shape, model, 2, kPiece, peer_gpu());
    Asker asker(world, c.shape, model);
    Share share;
    for (size_t i = 0; i < kRoutings.size(); ++i)
      for (const uint32_t tokens : {1U, 6U, kPiece}) {
        const std::string what = std::string(c.name) + ", " + name(kRoutings[i]) + ", " + std::to_string(tokens);
        const oracle::Rows rows = make_rows(kRoutings[i], c.shape, 2, tokens, i);
        const oracle::Rows others = make_rows(kRoutings[(i + 3) % kRoutings.size()], c.shape, 2, kPiece - 1, i);
        ASSERT_EQ(asker.ask({{1, kIdentityLayer, rows}}, share), "") << what << ", identity";
        ASSERT_EQ(asker.ask({{1, 1, rows}}, share), "") << what << ", experts";
        ASSERT_EQ(asker.ask({{0, 1, others}, {1, kIdentityLayer, rows}, {2, 1, rows}}, share), "") << what << ", all";
      }
    std::printf("%s: partials of experts with the CPU's bits: %llu of %llu\n", c.name,
                static_cast<unsigned long long>(share.equal), static_cast<unsigned long long>(share.all));
  }
}

INSTANTIATE_TEST_SUITE_P(On, CudaSteps, testing::Values(1, 2), test::gpus_name);

}  // namespace
}  // namespace moed
