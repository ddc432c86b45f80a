#include "control/ucx.h"

#include <ucp/api/ucp.h>

#include <utility>

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/post.hpp>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <thread>

namespace moed::control {
namespace {

namespace asio = boost::asio;

constexpr unsigned kMessage = 1;    // the one active message: ours are told apart by their header
constexpr int kProgressBurst = 64;  // turns of UCX before Asio has its turn
// What is queued when the worker ends has so long to go.
constexpr std::chrono::milliseconds kFlushTime{100};

void check(ucs_status_t status, const char* step) {
  if (status != UCS_OK) throw std::runtime_error(std::string("ucx: ") + step + ": " + ucs_status_string(status));
}

}  // namespace

class UcxWorker::Impl {
 public:
  Impl(asio::io_context& io, Handlers handlers, const std::string& ports, const std::string& devices)
      : io_(io), handlers_(std::move(handlers)), events_(io), alive_(std::make_shared<bool>(true)) {
    open(ports, devices);
    kick();
  }

  ~Impl() {
    *alive_ = false;
    for (auto& [number, end] : endpoints_) release(*end);
    endpoints_.clear();
    for (int i = 0; i < 10'000 && ucp_worker_progress(worker_) != 0; ++i) {
    }
    const bool empty = flush();
    if (events_.is_open()) events_.release();  // UCX owns the descriptor
    if (!empty) return;                        // better never freed than aborted
    ucp_worker_destroy(worker_);
    ucp_cleanup(context_);
  }

  const std::vector<uint8_t>& address() const { return address_; }

  Endpoint connect(std::span<const uint8_t> address, std::string& why) {
    auto end = std::make_unique<End>();
    end->owner = this;
    end->number = ++last_endpoint_;
    ucp_ep_params_t parameters{};
    parameters.field_mask =
        UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    parameters.address = reinterpret_cast<const ucp_address_t*>(address.data());
    parameters.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    parameters.err_handler = {.cb = &Impl::endpoint_failed, .arg = end.get()};
    if (const ucs_status_t status = ucp_ep_create(worker_, &parameters, &end->handle); status != UCS_OK) {
      why = std::string("ucx: endpoint: ") + ucs_status_string(status);
      return 0;
    }
    const Endpoint number = end->number;
    endpoints_[number] = std::move(end);
    kick();
    return number;
  }

  bool send(Endpoint endpoint, std::span<const uint8_t> header, std::span<const uint8_t> body) {
    const auto at = endpoints_.find(endpoint);
    if (at == endpoints_.end() || at->second->failed || body.size() > kMaxBody || *at->second->pending >= kMaxPending)
      return false;
    auto* message = new Message{at->second->pending, {}, header.size()};
    message->bytes.assign(header.begin(), header.end());
    message->bytes.insert(message->bytes.end(), body.begin(), body.end());
    ucp_request_param_t parameters{};
    parameters.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
    parameters.flags = UCP_AM_SEND_FLAG_EAGER;
    parameters.cb.send = &Impl::sent;
    parameters.user_data = message;
    ++*message->pending;
    void* request = ucp_am_send_nbx(at->second->handle, kMessage, message->bytes.data(), message->header,
                                    message->bytes.data() + message->header, body.size(), &parameters);
    kick();
    if (UCS_PTR_IS_PTR(request)) return true;  // sent() frees the message
    --*message->pending;
    delete message;
    return request == nullptr;
  }

  void close(Endpoint endpoint) {
    const auto at = endpoints_.find(endpoint);
    if (at == endpoints_.end()) return;
    release(*at->second);
    closing_.push_back(std::move(at->second));  // the error handler's argument outlives the closing
    endpoints_.erase(at);
    kick();
  }

 private:
  struct End {
    Impl* owner = nullptr;
    Endpoint number = 0;
    ucp_ep_h handle = nullptr;
    bool failed = false;
    std::shared_ptr<size_t> pending = std::make_shared<size_t>(0);
  };
  struct Message {
    std::shared_ptr<size_t> pending;
    std::vector<uint8_t> bytes;  // header, then body: both have to live until UCX is done with them
    size_t header;
  };

  void open(const std::string& ports, const std::string& devices) {
    ::setenv("UCX_TCP_PORT_RANGE", ports.c_str(), 1);  // of UCT: no key of ucp_config_modify (1.13)
    ucp_config_t* config = nullptr;
    check(ucp_config_read(nullptr, nullptr, &config), "configuration");
    const std::unique_ptr<ucp_config_t, decltype(&ucp_config_release)> owner(config, ucp_config_release);
    check(ucp_config_modify(config, "TLS", "tcp"), "TLS=tcp");
    if (!devices.empty()) check(ucp_config_modify(config, "NET_DEVICES", devices.c_str()), "NET_DEVICES");
    ucp_params_t parameters{};
    parameters.field_mask = UCP_PARAM_FIELD_FEATURES;
    parameters.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
    check(ucp_init(&parameters, config, &context_), "context");
    ucp_worker_params_t worker{};
    worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    worker.thread_mode = UCS_THREAD_MODE_SINGLE;
    check(ucp_worker_create(context_, &worker, &worker_), "worker");
    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                         UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = kMessage;
    handler.flags = UCP_AM_FLAG_WHOLE_MSG;
    handler.cb = &Impl::received;
    handler.arg = this;
    check(ucp_worker_set_am_recv_handler(worker_, &handler), "handler");
    ucp_address_t* address = nullptr;
    size_t bytes = 0;
    check(ucp_worker_get_address(worker_, &address, &bytes), "address");
    const auto* first = reinterpret_cast<const uint8_t*>(address);
    address_.assign(first, first + bytes);
    ucp_worker_release_address(worker_, address);
    int fd = -1;
    check(ucp_worker_get_efd(worker_, &fd), "event descriptor");
    events_.assign(fd);
  }

  static ucs_status_t received(void* self, const void* header, size_t header_bytes, void* data, size_t bytes,
                               const ucp_am_recv_param_t* parameters) {
    const bool ours = (parameters->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0 && bytes <= kMaxBody;
    // While the worker ends, whom a message would be handed to may be gone.
    if (!ours || !*static_cast<Impl*>(self)->alive_) return UCS_OK;
    static_cast<Impl*>(self)->handlers_.message({static_cast<const uint8_t*>(header), header_bytes},
                                                {static_cast<const uint8_t*>(data), bytes});
    return UCS_OK;
  }

  static void sent(void* request, ucs_status_t, void* user_data) {
    const std::unique_ptr<Message> message(static_cast<Message*>(user_data));
    --*message->pending;
    ucp_request_free(request);
  }

  /// Runs inside UCX, where nothing may be closed: the rest is posted.
  static void endpoint_failed(void* argument, ucp_ep_h, ucs_status_t status) {
    End* end = static_cast<End*>(argument);
    if (end->failed) return;
    end->failed = true;
    Impl* self = end->owner;
    asio::post(self->io_, [self, alive = self->alive_, number = end->number, status] {
      if (!*alive || !self->endpoints_.contains(number)) return;
      self->close(number);
      self->handlers_.failed(number, ucs_status_string(status));
    });
  }

  void release(End& end) {
    end.failed = true;
    ucp_request_param_t parameters{};
    parameters.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    parameters.flags = UCP_EP_CLOSE_FLAG_FORCE;
    void* request = ucp_ep_close_nbx(end.handle, &parameters);
    for (int i = 0; UCS_PTR_IS_PTR(request) && i < 10'000 && ucp_request_check_status(request) == UCS_INPROGRESS; ++i)
      ucp_worker_progress(worker_);
    if (UCS_PTR_IS_PTR(request)) ucp_request_free(request);
  }

  /// Sends what is queued: UCX's own answer to a peer that is just connecting, with which in its queue a worker that is
  /// destroyed aborts the process (before UCX 1.14, which has openucx commit 9ccaf31). False: it did not go in time.
  bool flush() {
    const ucp_request_param_t parameters{};
    void* request = ucp_worker_flush_nbx(worker_, &parameters);
    for (const auto until = std::chrono::steady_clock::now() + kFlushTime; UCS_PTR_IS_PTR(request);) {
      if (ucp_request_check_status(request) != UCS_INPROGRESS) {
        ucp_request_free(request);
        request = ucp_worker_flush_nbx(worker_, &parameters);  // something may have come meanwhile
      } else if (ucp_worker_progress(worker_) == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      if (std::chrono::steady_clock::now() < until || !UCS_PTR_IS_PTR(request)) continue;
      ucp_request_free(request);
      return false;
    }
    return true;
  }

  /// Lets the worker run soon: whatever was asked of it outside its own callbacks disarms its descriptor.
  void kick() {
    if (kicked_) return;
    kicked_ = true;
    asio::post(io_, [this, alive = alive_] {
      if (!*alive) return;
      kicked_ = false;
      progress();
    });
  }

  void progress() {
    for (int i = 0; i < kProgressBurst; ++i)
      if (ucp_worker_progress(worker_) == 0) break;
    closing_.clear();
    if (ucp_worker_arm(worker_) != UCS_OK) return kick();  // busy: there is more to do
    if (waiting_) return;
    waiting_ = true;
    events_.async_wait(asio::posix::stream_descriptor::wait_read,
                       [this, alive = alive_](boost::system::error_code error) {
                         if (!*alive) return;
                         waiting_ = false;
                         if (!error) progress();
                       });
  }

  asio::io_context& io_;
  Handlers handlers_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  std::vector<uint8_t> address_;
  asio::posix::stream_descriptor events_;
  std::map<Endpoint, std::unique_ptr<End>> endpoints_;
  std::vector<std::unique_ptr<End>> closing_;
  Endpoint last_endpoint_ = 0;
  bool kicked_ = false, waiting_ = false;
  std::shared_ptr<bool> alive_;  // handlers that Asio still holds ask it first
};

UcxWorker::UcxWorker(asio::io_context& io, Handlers handlers, const std::string& ports, const std::string& devices)
    : impl_(std::make_unique<Impl>(io, std::move(handlers), ports, devices)) {}
UcxWorker::~UcxWorker() = default;
std::string UcxWorker::version() {
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  ucp_get_version(&major, &minor, &release);
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(release);
}
const std::vector<uint8_t>& UcxWorker::address() const { return impl_->address(); }
UcxWorker::Endpoint UcxWorker::connect(std::span<const uint8_t> address, std::string& why) {
  return impl_->connect(address, why);
}
bool UcxWorker::send(Endpoint endpoint, std::span<const uint8_t> header, std::span<const uint8_t> body) {
  return impl_->send(endpoint, header, body);
}
void UcxWorker::close(Endpoint endpoint) { impl_->close(endpoint); }

}  // namespace moed::control
