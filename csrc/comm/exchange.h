// One rank's operations over a transport: requests are exchanged and compared, then data move.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

#include "comm/request.h"
#include "comm/transport.h"

namespace muster::comm::exchange {

enum class Presence : int64_t { requests, finished, failed, absent };

/// What ranks exchange; a whole number of int64.
struct Card {
  Presence presence = Presence::requests;
  Request request;
  char reason[256] = {};
};
static_assert(sizeof(Card) % sizeof(int64_t) == 0 && std::is_trivially_copyable_v<Card>);

class Exchange;

/// One collective at one rank. Externally synchronised with its exchange.
struct Operation final : Work::Impl {
  enum class State { queued, exchanging, moving, finished };

  bool advance() override;
  void wait(Milliseconds timeout) override;
  std::vector<at::Tensor> outputs() override { return gathered; }

  std::shared_ptr<Exchange> exchange;
  uint64_t number = 0;
  Card card;
  bool exchanges = false;
  at::Tensor tensor;
  at::Tensor output;
  std::vector<at::Tensor> gathered;

  State state = State::queued;
  Work work;                      // of the exchange, then of the data
  at::Tensor buffer;              // what the transport works on
  std::vector<at::Tensor> parts;  // of a gather
  std::vector<Card> cards;
  std::exception_ptr error;
};

/// One rank's side. Externally synchronised, except abort().
class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  using Clock = std::chrono::steady_clock;

  Exchange(std::shared_ptr<Transport> transport, bool check, Milliseconds timeout)
      : transport_(std::move(transport)), check_(check), timeout_(timeout) {}

  Transport& transport() noexcept { return *transport_; }

  /// Numbers the operation and advances what can be advanced. `output`: of a reduce_scatter.
  Work issue(const Request& request, const at::Tensor& tensor, const at::Tensor& output = {});
  /// Whether the operation is done. Throws the error that ended it.
  bool poll(Operation& op);
  void wait(Operation& op, Milliseconds timeout);

  void begin_scope(uint64_t scope);
  /// Blocks until all ranks have ended the scope.
  void end_scope(ScopeEnd end, const std::string& reason);

  /// Throws what ended the group, if something did.
  void check();
  void abort(const std::string& reason) noexcept;

 private:
  bool is_done(const Operation& op) const;
  void advance();
  bool step(Operation& op);
  void wait_for_front(Clock::time_point deadline);
  Work start_exchange(Operation& op);
  bool match(Operation& op);
  void start_data(Operation& op, const Request& request);
  void finish(Operation& op, const Request& request);
  void fail(std::exception_ptr error);
  const Request* requested(const std::vector<Card>& cards) const;

  const std::shared_ptr<Transport> transport_;
  const bool check_;
  const Milliseconds timeout_;
  std::deque<std::shared_ptr<Operation>> under_way_;
  uint64_t scope_ = 0;  // 1 + id inside a scope
  uint64_t issued_ = 0;
  uint64_t issued_in_scope_ = 0;
  std::exception_ptr failure_;
  std::mutex mutex_;
  bool is_aborted_ = false;   // guarded by mutex_
  std::string abort_reason_;  // guarded by mutex_
};

}  // namespace muster::comm::exchange
