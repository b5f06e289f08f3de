#include "comm/exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace muster::comm::exchange {

namespace {

constexpr int64_t kCardNumel = sizeof(Card) / sizeof(int64_t);

at::ScalarType dtype_of(const Request& request) { return static_cast<at::ScalarType>(request.dtype); }
ReduceOp reduction_of(const Request& request) { return static_cast<ReduceOp>(request.reduction); }

// The dtype and reduction in which a transport computes what was asked for.
std::pair<at::ScalarType, ReduceOp> wide(at::ScalarType dtype, ReduceOp op) {
  switch (dtype) {
    case at::kHalf:
    case at::kBFloat16:
      return {at::kFloat, op};
    case at::kShort:
    case at::kChar:
      return {at::kInt, op};
    case at::kBool:
      return {at::kByte, op == ReduceOp::sum ? ReduceOp::max : op};
    default:
      return {dtype, op};
  }
}

// What a rank without a term contributes.
at::Scalar identity(at::ScalarType dtype, ReduceOp op) {
  if (op == ReduceOp::sum) return 0;
  const bool is_max = op == ReduceOp::max;
  switch (dtype) {
    case at::kByte:
      return is_max ? 0 : 255;
    case at::kInt:
      return is_max ? std::numeric_limits<int32_t>::min() : std::numeric_limits<int32_t>::max();
    case at::kLong:
      return is_max ? std::numeric_limits<int64_t>::min() : std::numeric_limits<int64_t>::max();
    default:
      return is_max ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::infinity();
  }
}

// A dense tensor's memory in its own order.
at::Tensor flat(const at::Tensor& tensor) { return tensor.as_strided({tensor.numel()}, {1}); }

}  // namespace

bool Operation::advance() { return exchange->poll(*this); }
void Operation::wait(Milliseconds timeout) { exchange->wait(*this, timeout); }

Work Exchange::issue(const Request& request, const at::Tensor& tensor, const at::Tensor& output) {
  check();
  auto op = std::make_shared<Operation>();
  op->exchange = shared_from_this();
  op->number = issued_++;
  op->card.request = request;
  op->card.request.scope = scope_;
  op->exchanges = check_ || scope_ != 0 || request.kind == OpKind::all_gather || request.kind == OpKind::barrier;
  op->tensor = tensor;
  op->output = output;
  ++issued_in_scope_;
  under_way_.push_back(op);
  advance();
  return Work(std::move(op));
}

bool Exchange::poll(Operation& op) {
  if (!is_done(op)) advance();
  if (op.error) std::rethrow_exception(op.error);
  return is_done(op);
}

void Exchange::wait(Operation& op, Milliseconds timeout) {
  const auto deadline = Clock::now() + (timeout.count() < 0 ? timeout_ : timeout);
  while (!is_done(op)) {
    advance();
    if (!is_done(op)) wait_for_front(deadline);
  }
  if (op.error) std::rethrow_exception(op.error);
}

void Exchange::begin_scope(uint64_t scope) {
  check();
  if (scope_ != 0) throw InvalidArgument("begin_scope inside a scope; call end_scope first");
  scope_ = scope + 1;
  issued_in_scope_ = 0;
}

void Exchange::check() {
  {
    const std::lock_guard lock(mutex_);
    if (is_aborted_ && !failure_) failure_ = std::make_exception_ptr(CommError(abort_reason_));
  }
  if (failure_) std::rethrow_exception(failure_);
}

void Exchange::abort(const std::string& reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!is_aborted_) abort_reason_ = reason;
    is_aborted_ = true;
  }
  transport_->abort(reason);
}

bool Exchange::is_done(const Operation& op) const {
  if (op.error) return true;
  return op.state == Operation::State::finished && (under_way_.empty() || under_way_.front()->number > op.number);
}

// All ranks issue to the transport in one order: an operation's data go before the next one's exchange.
void Exchange::advance() {
  if (failure_) return;
  try {
    for (const std::shared_ptr<Operation>& op : under_way_) {
      if (!step(*op)) break;
    }
  } catch (const Error&) {
    fail(std::current_exception());
    return;
  }
  while (!under_way_.empty() && under_way_.front()->state == Operation::State::finished) under_way_.pop_front();
}

// Returns false while later operations may not be issued.
bool Exchange::step(Operation& op) {
  if (op.state == Operation::State::queued) {
    if (op.exchanges) {
      op.work = start_exchange(op);
      op.state = Operation::State::exchanging;
    } else {
      op.state = Operation::State::moving;
      start_data(op, op.card.request);
    }
  }
  if (op.state == Operation::State::exchanging) {
    if (!op.work.done()) return false;
    op.state = match(op) ? Operation::State::moving : Operation::State::finished;
    if (op.state == Operation::State::moving) start_data(op, op.card.request);
  }
  if (op.state == Operation::State::moving && op.work.done()) {
    finish(op, op.card.request);
    op.state = Operation::State::finished;
  }
  return true;
}

void Exchange::wait_for_front(Clock::time_point deadline) {
  if (failure_ || under_way_.empty()) return;
  const std::shared_ptr<Operation> front = under_way_.front();
  const auto left = std::max(Milliseconds(0), std::chrono::ceil<Milliseconds>(deadline - Clock::now()));
  try {
    front->work.wait(left);
  } catch (const Timeout& error) {
    fail(std::make_exception_ptr(Timeout("rank " + std::to_string(transport_->rank()) + " waited for " +
                                         describe(front->card.request) + ": " + error.what())));
  } catch (const Error&) {
    fail(std::current_exception());
  } catch (...) {
    fail(std::make_exception_ptr(CommError("rank " + std::to_string(transport_->rank()) +
                                           " was interrupted while it waited for " + describe(front->card.request))));
    throw;
  }
}

void Exchange::fail(std::exception_ptr error) {
  failure_ = std::move(error);
  for (const std::shared_ptr<Operation>& op : under_way_) {
    if (op->state == Operation::State::finished) continue;
    op->error = failure_;
    op->state = Operation::State::finished;
  }
  under_way_.clear();
}

// --- exchanging requests -------------------------------------------------------------------------------------------

Work Exchange::start_exchange(Operation& op) {
  at::Tensor mine = at::empty({kCardNumel}, at::kLong);
  std::memcpy(mine.mutable_data_ptr(), &op.card, sizeof(Card));
  op.buffer = mine.to(transport_->device());
  op.parts.clear();
  for (int r = 0; r < transport_->size(); ++r) op.parts.push_back(at::zeros({kCardNumel}, op.buffer.options()));
  return transport_->gather(op.parts, op.buffer);
}

const Request* Exchange::requested(const std::vector<Card>& cards) const {
  const auto first =
      std::find_if(cards.begin(), cards.end(), [](const Card& card) { return card.presence == Presence::requests; });
  return first == cards.end() ? nullptr : &first->request;
}

// Every rank sees the same cards and draws the same conclusion. False when no data are to move. Throws where the
// group cannot go on.
bool Exchange::match(Operation& op) {
  op.cards.clear();
  for (const at::Tensor& part : op.parts) {
    const at::Tensor host = part.to(at::kCPU);
    Card card;
    std::memcpy(&card, host.const_data_ptr(), sizeof(Card));
    op.cards.push_back(card);
  }
  const int size = transport_->size();
  int first = -1;
  for (int r = 0; r < size; ++r) {
    if (op.cards[r].presence != Presence::requests) continue;
    if (first < 0) first = r;
    const std::string mismatch = describe_mismatch(first, op.cards[first].request, r, op.cards[r].request);
    if (mismatch.empty()) continue;
    if (op.cards[first].request.scope == 0) throw LayoutMismatch(mismatch);
    op.error = std::make_exception_ptr(LayoutMismatch(mismatch));
    return false;
  }
  if (first < 0) return false;
  const std::string what = describe(op.cards[first].request);
  for (const Presence presence : {Presence::failed, Presence::finished}) {
    const auto found =
        std::find_if(op.cards.begin(), op.cards.end(), [&](const Card& c) { return c.presence == presence; });
    if (found == op.cards.end()) continue;
    const auto rank = static_cast<int>(found - op.cards.begin());
    const std::string who = "rank " + std::to_string(rank);
    if (presence == Presence::failed) {
      const std::string reason(found->reason, strnlen(found->reason, sizeof(Card::reason)));
      op.error = failed_in_scope(transport_->worker_of(rank), rank, who, what, reason);
    } else {
      op.error = std::make_exception_ptr(LayoutMismatch(
          who + " did not take part in " + what + "; all ranks must issue the same collectives in the same order"));
    }
    return false;
  }
  return true;
}

void Exchange::end_scope(ScopeEnd end, const std::string& reason) {
  if (scope_ == 0) throw InvalidArgument("end_scope without begin_scope; call begin_scope first");
  if (end == ScopeEnd::absent && issued_in_scope_ != 0) {
    throw InvalidArgument(
        "a rank that issued collectives in a scope cannot be absent from it; end it as finished or failed");
  }
  const auto deadline = Clock::now() + timeout_;
  while (!failure_ && !under_way_.empty()) {
    advance();
    if (!under_way_.empty()) wait_for_front(deadline);
  }
  scope_ = 0;
  for (bool all_ended = false; !failure_ && !all_ended;) {
    auto op = std::make_shared<Operation>();
    op->card.presence = end == ScopeEnd::finished ? Presence::finished
                        : end == ScopeEnd::failed ? Presence::failed
                                                  : Presence::absent;
    std::strncpy(op->card.reason, reason.c_str(), sizeof(Card::reason) - 1);
    try {
      const auto left = [&] {
        return std::max(Milliseconds(0), std::chrono::ceil<Milliseconds>(deadline - Clock::now()));
      };
      op->work = start_exchange(*op);
      op->work.wait(left());
      const bool moves = match(*op);
      const Request* request = requested(op->cards);
      all_ended = request == nullptr;
      if (!moves) continue;
      op->card.request = *request;
      start_data(*op, *request);
      op->work.wait(left());
    } catch (const Error&) {
      fail(std::current_exception());
    }
  }
}

// --- moving data ---------------------------------------------------------------------------------------------------

// A rank without a tensor sits the scope out and contributes what changes nothing.
void Exchange::start_data(Operation& op, const Request& request) {
  const auto options = at::TensorOptions().dtype(dtype_of(request)).device(transport_->device());
  const bool takes_part = op.card.presence == Presence::requests;
  op.work = Work();
  if (request.kind == OpKind::barrier) return;
  if (request.kind == OpKind::all_gather) {
    int64_t largest = 0;
    for (const Card& card : op.cards) {
      if (card.presence == Presence::requests) largest = std::max(largest, card.request.numel);
    }
    op.parts.clear();
    if (largest == 0) return;
    op.buffer = at::zeros({largest}, options);
    if (takes_part) op.buffer.narrow(0, 0, op.tensor.numel()).copy_(op.tensor.reshape({-1}));
    for (int r = 0; r < transport_->size(); ++r) op.parts.push_back(at::zeros({largest}, options));
    op.work = transport_->gather(op.parts, op.buffer);
  } else if (request.numel == 0) {
    return;
  } else if (request.kind == OpKind::broadcast) {
    const bool has_source = op.cards.empty() || op.cards[request.source].presence == Presence::requests;
    if (!has_source) return;
    op.buffer = takes_part ? flat(op.tensor) : at::zeros({request.numel}, options);
    op.work = transport_->broadcast(op.buffer, request.source);
  } else {
    const auto [dtype, reduction] = wide(dtype_of(request), reduction_of(request));
    const bool in_place = takes_part && request.kind == OpKind::all_reduce && dtype == dtype_of(request);
    if (in_place) {
      op.buffer = flat(op.tensor);
    } else if (takes_part) {
      op.buffer = flat(op.tensor).to(options.dtype(dtype), false, true);
    } else {
      op.buffer = at::full({request.numel}, identity(dtype, reduction), options.dtype(dtype));
    }
    op.work = transport_->all_reduce(op.buffer, reduction);
  }
}

void Exchange::finish(Operation& op, const Request& request) {
  if (request.kind == OpKind::all_gather) {
    op.gathered.resize(transport_->size());
    for (int r = 0; r < transport_->size(); ++r) {
      const Request& theirs = op.cards[r].request;
      if (op.cards[r].presence != Presence::requests) continue;
      const at::IntArrayRef sizes(theirs.sizes, theirs.ndim);
      op.gathered[r] =
          op.parts.empty() ? at::empty(sizes, op.tensor.options()) : op.parts[r].narrow(0, 0, theirs.numel).view(sizes);
    }
  } else if (request.numel > 0 && request.kind == OpKind::all_reduce) {
    if (dtype_of(request) != op.buffer.scalar_type()) flat(op.tensor).copy_(op.buffer);
  } else if (request.numel > 0 && request.kind == OpKind::reduce_scatter) {
    const int64_t part = op.output.numel();
    flat(op.output).copy_(op.buffer.narrow(0, part * transport_->rank(), part));
  }
  op.buffer = at::Tensor();
  op.parts.clear();
}

}  // namespace muster::comm::exchange
