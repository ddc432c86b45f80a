// The plan of a serve pass on the GPU, alone, against the CPU back end's: the same groups of (layer, local expert) in
// the same order, in each the same rows and slots.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/device_world.h"
#include "kernels/cuda/passes.h"
#include "kernels/cuda/side.h"
#include "tests/support/played_peer.h"
#include "tests/support/synthetic.h"

namespace moed {
namespace {

using test::SyntheticModel;

/// Calls of one serve pass, made by hand: what became of each, its layer, and the ids of its rows.
struct Pass {
  std::vector<Source> sources{};
  std::vector<uint32_t> incomplete{};        ///< by source
  std::vector<std::vector<int32_t>> rows{};  ///< ids [K] of each row
  std::vector<cuda::Place> place{};          ///< of each row

  void add_source(uint32_t layer, Status status, uint32_t missing) {
    Source& source = sources.emplace_back();
    source.call.layer = layer;
    source.status = status;
    incomplete.push_back(missing);
  }
  void add_row(std::vector<int32_t> ids) {
    place.push_back({static_cast<uint32_t>(sources.size() - 1), static_cast<uint32_t>(rows.size())});
    rows.push_back(std::move(ids));
  }
  bool served(uint32_t source) const { return sources[source].status == Status::ok && incomplete[source] == 0; }
};

using RowSlots = std::set<std::pair<uint32_t, uint32_t>>;

/// Pairs of one (layer, local expert): layer counts from the first one, pairs from `first`.
struct Group {
  uint32_t layer = 0, expert = 0, first = 0;
  RowSlots members{};

  std::string text() const {
    return "layer " + std::to_string(layer) + ", local expert " + std::to_string(expert) + ", " +
           std::to_string(members.size()) + " pairs from " + std::to_string(first);
  }
  /// The first row and slot that one of the two groups lacks; empty: they have the same.
  std::string odd_one(const Group& other) const {
    for (const auto& [a, b] : {std::pair(this, &other), std::pair(&other, this)})
      for (const auto& [row, slot] : a->members)
        if (!b->members.contains({row, slot}))
          return ", row " + std::to_string(row) + " slot " + std::to_string(slot) + " is in one alone";
    return "";
  }
  bool operator==(const Group&) const = default;
};

/// The plan step on a GPU's own arrays, pass after pass.
class Planner {
 public:
  Planner(const BackendOptions& options) : options_(options), memory_(test::loaded_driver(), 0), copies_(0) {
    std::string why;
    if (!side_.make()) throw std::runtime_error(health_.text());
    if (world_.make(memory_, options, cuda::GpuFacts{}, side_, why) != Status::ok) throw std::runtime_error(why);
  }

  uint32_t max_rows() const { return world_.world().max_rows; }

  /// Empty, or the first thing that is not as the CPU has it.
  std::string check(const Pass& pass) {
    upload(pass);
    cuda::launch_plan(world_.world(), copies_.stream());
    copies_.settle();
    download(pass);
    const std::vector<Group> want = groups_on_cpu(pass);
    const uint64_t pairs = options_.shape.top_k * pass.rows.size();
    if (state_.groups != want.size() || state_.pairs > pairs)
      return std::to_string(state_.groups) + " groups and " + std::to_string(state_.pairs) + " pairs instead of " +
             std::to_string(want.size()) + " groups";
    const std::vector<Group> got = groups_of_gpu();
    for (size_t g = 0; g < want.size(); ++g)
      if (got[g] != want[g]) {
        return "group " + std::to_string(g) + " is " + got[g].text() + "; not " + want[g].text() +
               got[g].odd_one(want[g]);
      }
    return compare_rest(pass, want);
  }

 private:
  void upload(const Pass& pass) {
    const cuda::World& w = world_.world();
    std::vector<cuda::DeviceSource> sources(pass.sources.size());
    for (size_t i = 0; i < sources.size(); ++i) {
      sources[i].call.layer = pass.sources[i].call.layer;
      sources[i].status = static_cast<uint32_t>(pass.sources[i].status);
      sources[i].incomplete = pass.incomplete[i];
    }
    std::vector<std::byte> gathered(pass.rows.size() * w.row_stride);
    for (size_t r = 0; r < pass.rows.size(); ++r)
      std::memcpy(&gathered[r * w.row_stride], pass.rows[r].data(), pass.rows[r].size() * sizeof(int32_t));
    state_ = {};
    state_.working = 1;
    state_.sources = static_cast<uint32_t>(sources.size());
    state_.rows = static_cast<uint32_t>(pass.rows.size());
    copies_.to_gpu(w.source, sources.data(), sources.size() * sizeof sources[0]);
    copies_.to_gpu(w.place, pass.place.data(), pass.place.size() * sizeof pass.place[0]);
    copies_.to_gpu(w.gathered, gathered.data(), gathered.size());
    copies_.to_gpu(w.serve, &state_, sizeof state_);
  }

  void download(const Pass& pass) {
    const cuda::World& w = world_.world();
    const auto take = [&](auto& to, const auto* from, uint64_t count) {
      to.resize(count);
      copies_.from_gpu(to.data(), from, count * sizeof to[0]);
    };
    copies_.from_gpu(&state_, w.serve, sizeof state_);
    const uint32_t most = w.model_layers == 0 ? 0 : w.max_pairs;
    take(groups_, w.group, std::min(state_.groups, most));
    take(pairs_, w.pair, std::min(state_.pairs, most));
    take(pair_of_, w.pair_of, pass.rows.size() * w.shape.top_k);
    take(counts_, w.key_count, uint64_t{w.model_layers} * w.local);
  }

  std::vector<Group> groups_of_gpu() const {
    std::vector<Group> all;
    for (const cuda::Group& g : groups_) {
      Group& group = all.emplace_back(Group{g.layer, g.expert, g.first});
      for (uint64_t i = g.first; i < uint64_t{g.first} + g.count && i < pairs_.size(); ++i)
        group.members.emplace(pairs_[i].row, pairs_[i].slot);
    }
    return all;
  }

  /// The CPU takes rows of served sources only into a pass; here they get their numbers among all rows back.
  std::vector<Group> groups_on_cpu(const Pass& pass) const {
    Rows rows;
    std::vector<uint32_t> number;
    for (uint32_t r = 0; r < pass.rows.size(); ++r) {
      if (!pass.served(pass.place[r].source)) continue;
      number.push_back(r);
      rows.place.push_back({pass.place[r].source, pass.place[r].token});
      rows.ids.insert(rows.ids.end(), pass.rows[r].begin(), pass.rows[r].end());
    }
    rows.count = static_cast<uint32_t>(number.size());
    Plan plan;
    cpu::plan({.shape = &options_.shape,
               .model = &options_.weights,
               .rank = options_.rank,
               .ranks = options_.ranks,
               .sources = pass.sources,
               .rows = &rows,
               .plan = &plan});
    std::vector<Group> all;
    for (uint32_t i = 0; i < plan.pairs.size(); ++i) {
      const Pair& p = plan.pairs[i];
      const uint32_t layer = p.layer - options_.shape.first_layer;
      if (all.empty() || all.back().layer != layer || all.back().expert != p.local)
        all.push_back(Group{layer, p.local, i});
      all.back().members.emplace(number[p.row], p.slot);
    }
    return all;
  }

  /// With the groups right: the number of pairs, the way back from rows to pairs, and counts that are zero again.
  std::string compare_rest(const Pass& pass, const std::vector<Group>& groups) const {
    uint64_t members = 0;
    for (const Group& g : groups) members += g.members.size();
    if (pairs_.size() != members) return std::to_string(pairs_.size()) + " pairs instead of " + std::to_string(members);
    const uint32_t k = options_.shape.top_k;
    std::vector<uint32_t> want(pass.rows.size() * k, kNoPair);
    for (uint32_t i = 0; i < pairs_.size(); ++i) want[pairs_[i].row * k + pairs_[i].slot] = i;
    for (size_t i = 0; i < want.size(); ++i)
      if (pair_of_[i] != want[i])
        return "row " + std::to_string(i / k) + ", slot " + std::to_string(i % k) + " says pair " +
               std::to_string(pair_of_[i]) + ", and is pair " + std::to_string(want[i]);
    for (size_t i = 0; i < counts_.size(); ++i)
      if (counts_[i] != 0)
        return "after the pass the count of key " + std::to_string(i) + " is " + std::to_string(counts_[i]);
    return "";
  }

  const BackendOptions options_;
  cuda::Memory memory_;
  test::Copies copies_;
  cuda::Health health_;
  cuda::Side side_{test::loaded_driver(), health_};
  cuda::DeviceWorld world_;
  cuda::ServeState state_{};
  std::vector<cuda::Group> groups_;
  std::vector<cuda::RowSlot> pairs_;
  std::vector<uint32_t> pair_of_, counts_;
};

constexpr uint32_t kFirstLayer = 5, kLayers = 3;

BackendOptions options_of(uint32_t experts, uint32_t top_k, uint32_t rank, uint32_t ranks) {
  BackendOptions o;
  o.shape = make_shape(64, 64, 32, experts, top_k);
  o.shape.first_layer = kFirstLayer;
  o.shape.layers = kLayers;
  o.rank = rank;
  o.ranks = ranks;
  o.max_tokens = 16;
  o.lanes = 40;  // a pass takes one call of each lane at most
  o.max_call_tokens = 16;
  o.max_pairs = 2048;
  return o;
}

/// How the rows of one source choose their experts.
enum class Choice : uint32_t { any, one, masked, here, elsewhere, count };

int32_t choose(const BackendOptions& o, Choice choice, uint32_t one, std::mt19937_64& random) {
  const uint32_t first = first_expert(o.shape, o.rank, o.ranks);
  const uint32_t local = first_expert(o.shape, o.rank + 1, o.ranks) - first;
  const uint32_t here = first + static_cast<uint32_t>(random() % local);
  const auto any = static_cast<uint32_t>(random() % o.shape.experts);
  switch (choice) {
    case Choice::one:
      return static_cast<int32_t>(first + one % local);
    case Choice::masked:
      return random() % 3 == 0 ? -1 : static_cast<int32_t>(any);
    case Choice::here:
      return static_cast<int32_t>(here);
    case Choice::elsewhere:
      return any >= first && any < first + local ? -1 : static_cast<int32_t>(any);
    default:
      return static_cast<int32_t>(any);
  }
}

/// Up to seven sources of any layer, every fourth of which is not served.
Pass random_pass(const BackendOptions& o, uint32_t max_rows, std::mt19937_64& random) {
  Pass pass;
  const uint64_t sources = 1 + random() % 7;
  for (uint64_t i = 0; i < sources; ++i) {
    const auto layer = static_cast<uint32_t>(random() % (kLayers + 1));
    const uint64_t fate = random() % 12;
    pass.add_source(layer == kLayers ? kIdentityLayer : kFirstLayer + layer, fate == 0 ? Status::bad_route : Status::ok,
                    fate == 1   ? cuda::kMissing
                    : fate == 2 ? cuda::kOvertaken
                                : 0);
    const auto choice = static_cast<Choice>(random() % static_cast<uint32_t>(Choice::count));
    const auto one = static_cast<uint32_t>(random());
    const uint64_t rows = random() % 17;
    for (uint64_t r = 0; r < rows && pass.rows.size() < max_rows; ++r) {
      std::vector<int32_t> ids(o.shape.top_k);
      for (int32_t& id : ids) id = choose(o, choice, one, random);
      pass.add_row(ids);
    }
  }
  return pass;
}

class CudaPlan : public test::GpuTest {};

TEST_F(CudaPlan, RandomPassesOfSeveralLayersWithSourcesThatAreNotServed) {
  struct Case {
    uint32_t experts, top_k, rank, ranks;
  };
  std::mt19937_64 random(17);
  for (const Case& c : {Case{700, 4, 0, 1}, Case{12, 3, 1, 3}, Case{64, 32, 1, 2}, Case{8, 1, 7, 8}}) {
    BackendOptions options = options_of(c.experts, c.top_k, c.rank, c.ranks);
    const SyntheticModel model(options.shape, 7);
    options.weights = model.of_rank(c.rank, c.ranks);
    options.weights.layers[1].experts.clear();  // an identity layer among the others
    Planner planner(options);
    for (int round = 0; round < 150; ++round)
      ASSERT_EQ(planner.check(random_pass(options, planner.max_rows(), random)), "")
          << c.experts << " experts, top " << c.top_k << ", rank " << c.rank << " of " << c.ranks << ", pass " << round;
  }
}

TEST_F(CudaPlan, AFullPassOfOneExpertAndOfAll) {
  BackendOptions options = options_of(96, 4, 0, 2);
  const SyntheticModel model(options.shape, 7);
  options.weights = model.of_rank(0, 2);
  Planner planner(options);
  for (const uint32_t distinct : {1U, 2U, 48U, 96U}) {
    Pass pass;
    uint32_t next = 0;
    for (uint32_t row = 0; row < planner.max_rows(); ++row) {
      if (row % 16 == 0) pass.add_source(kFirstLayer + row / 16 % kLayers, Status::ok, 0);
      std::vector<int32_t> ids(options.shape.top_k);
      for (int32_t& id : ids) id = static_cast<int32_t>(next++ % distinct);
      pass.add_row(ids);
    }
    ASSERT_EQ(planner.check(pass), "") << distinct << " experts";
  }
}

TEST_F(CudaPlan, WithoutWeightsThereIsNothingToMultiply) {
  const BackendOptions options = options_of(8, 4, 0, 1);
  Planner planner(options);
  std::mt19937_64 random(5);
  for (int round = 0; round < 20; ++round)
    ASSERT_EQ(planner.check(random_pass(options, planner.max_rows(), random)), "") << "pass " << round;
}

}  // namespace
}  // namespace moed
