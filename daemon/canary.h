// Known tokens on lane 0: once a period an identity call and a call of real experts ask every rank whose link is ready,
// ourselves included, for an answer whose bits are known. The identity's are worked out here; an expert's are those of
// its first answer, whatever that was. One round has one token a rank, with as many of its experts as a token can name;
// the next round takes the next ones, and then the next layer, so every expert is seen again after layers *
// ceil(experts of a rank / top_k) periods. What was wrong is asked again in every round. A flipped bit is found when it
// changes an answer.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>

#include "daemon/abi/arena.h"
#include "daemon/abi/fd.h"
#include "daemon/metrics.h"
#include "daemon/service_loop.h"
#include "daemon/weights/checkpoint.h"

namespace moed {

struct CanaryOptions {
  Shape shape;
  uint32_t rank = 0, ranks = 1;
  uint32_t max_call_tokens = 65536;
  bool experts = true;          ///< the model has experts: identity alone otherwise
  uint32_t period_ms = 5000;    ///< at least 1
  uint32_t longest_ms = 60000;  ///< in which the service loop ends every call
};

/// All on the thread that runs `io`.
class Canary {
 public:
  /// Takes lane 0. Throws std::system_error where there is no memory for it, GpuError where the GPU is lost.
  Canary(boost::asio::io_context& io, CanaryOptions options, Backend& backend, ServiceLoop& service, Metrics& metrics);
  ~Canary();
  Canary(const Canary&) = delete;
  Canary& operator=(const Canary&) = delete;

  /// lives: by rank, 0 where the link is not ready, else a number that is another one in every life of the link.
  /// changed: missing() may be another.
  void start(std::function<std::vector<uint64_t>()> lives, std::function<void()> changed);
  /// A link has become ready or has ceased to be: who has not answered since is asked at once, alone.
  void look();
  /// No more rounds; a call that runs is left alone.
  void stop();
  /// "canary 2: wrong at layer 1, experts 8 to 11" for every rank with a usable link that has not answered as it
  /// should.
  std::vector<std::string> missing() const;

 private:
  enum class Answer : uint32_t { none, ok, late, wrong };
  /// What a token asks a rank for: the identity, or experts [first, end) of a layer. Empty: nothing.
  struct Question {
    uint32_t layer = 0, first = 0, end = 0;
    bool operator<(const Question& other) const {
      return std::tie(layer, first, end) < std::tie(other.layer, other.first, other.end);
    }
    std::string text() const;
  };
  struct Peer {
    Answer answer = Answer::none;
    Answer round = Answer::none;  ///< the worst of the present round
    std::set<Question> wrong;     ///< not put right since
    uint64_t life = 0;            ///< of its link; 0: not ready
    bool spoiled = false;         ///< the present round says nothing about it
  };
  struct Token {
    uint32_t rank;
    Question question;
  };
  using Probe = std::vector<Token>;  ///< one call: all of one layer

  void wait_for_round();
  void begin_round(bool all);
  void refresh_links();
  void add_probes(uint32_t layer);
  void add_wrong();
  void next();
  void ring(const Probe& probe);
  void lay_out(const Probe& probe);
  void wait_for_answer();
  void judge(const Reply& reply);
  void leave_out(const Reply& reply, Answer answer);
  void compare(const Token& token, uint32_t row);
  void note_wrong(const Token& token, const char* what);
  void end_round();
  void settle(uint32_t rank);
  Question question(uint32_t layer, uint32_t rank) const;
  std::vector<uint16_t> identity_row(const Token& token) const;
  bool asked(const Peer& peer) const;
  HostMailbox& box() const { return *reinterpret_cast<HostMailbox*>(mailbox_.data()); }

  const CanaryOptions options_;
  Backend& backend_;
  Metrics& metrics_;
  const ArenaSlot slot_;
  uint32_t batches_ = 1;  ///< rounds that one layer takes
  Mapping mailbox_, arena_;
  boost::asio::steady_timer timer_;
  std::function<std::vector<uint64_t>()> lives_;
  std::function<void()> changed_;
  std::vector<Peer> peers_;
  std::map<std::pair<uint32_t, Question>, Digest> right_;  ///< by rank: of the first answers of experts
  std::vector<Probe> probes_;                              ///< of the present round, the next one last
  Probe present_;
  bool running_ = false, all_ = false, again_ = false, stopped_ = false, overdue_ = false;
  std::string round_broken_, broken_;  ///< why our own calls do not work; empty: they do
  Nanos rung_ = 0, due_ = 0;           ///< due_: the next round of all
  uint64_t number_ = 0, rounds_ = 0;
};

}  // namespace moed
