// One rank's daemon: builds everything in order, runs, stops in reverse. daemon.cpp is its life, daemon_views.cpp what
// it says of itself.
#pragma once

#include <utility>

#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <memory>
#include <string>
#include <vector>

#include "daemon/attach_server.h"
#include "daemon/canary.h"
#include "daemon/config.h"
#include "daemon/http.h"
#include "daemon/links.h"
#include "daemon/metrics.h"
#include "daemon/model.h"
#include "daemon/rank_lock.h"
#include "daemon/recorder.h"
#include "daemon/report.h"
#include "daemon/service_loop.h"

namespace moed {

/// Members are in the order in which they are made; destruction is the reverse.
class Daemon {
 public:
  /// Throws what its parts throw: ConfigError, WeightsError, RankHeld, std::system_error, std::runtime_error.
  explicit Daemon(const Config& config);
  /// Until SIGTERM or SIGINT and the calls that ran then have ended: ok. Anything else is the back end's fault, said in
  /// the log: whoever called ends the process without destroying this.
  Status run();

 private:
  // daemon.cpp
  std::unique_ptr<Backend> loaded_backend();
  MetricsInfo metrics_info() const;
  ServiceOptions service_options();
  AttachHandlers attach_handlers();
  AttachOptions attach_options() const;
  void links_changed();
  void readiness_changed();
  std::unique_ptr<Canary> make_canary();
  void tick();
  bool failed();
  void wait_for_signal();
  void look_whether_drained();
  void warn_about_drills() const;

  // daemon_views.cpp
  std::vector<std::string> missing();
  std::vector<std::string> stalled() const;
  Report report();
  std::vector<Report::Peer> peer_reports() const;
  std::vector<WaitsRow> waits() const;
  Gauges gauges();
  HttpAnswer page(std::string_view path);

  const Config config_;
  const uint64_t incarnation_;
  const Nanos started_;
  Model model_;
  RankLock lock_;
  Metrics metrics_;
  boost::asio::io_context io_{1};
  Links links_;
  std::unique_ptr<Backend> backend_;
  boost::asio::signal_set signals_;  // as soon as the weights are there: until then a signal ends the process at once
  Recorder recorder_;
  ServiceLoop service_;
  std::unique_ptr<Canary> canary_;  ///< nullptr: switched off
  AttachServer attach_;
  std::unique_ptr<HttpServer> http_;
  boost::asio::steady_timer timer_, drain_timer_;
  bool draining_ = false;
  bool all_ready_ = false, left_ = false;
  Status health_ = Status::ok;
  Nanos drained_since_ = 0, quiet_since_ = 0;
  uint64_t sources_ = 0;
};

}  // namespace moed
