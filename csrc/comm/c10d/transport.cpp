#include "comm/c10d/transport.h"

#include <unistd.h>

#include <algorithm>
#include <thread>

#include "core/wait_hook.h"
#include "muster/error.h"

namespace muster::comm {
namespace {

using Clock = std::chrono::steady_clock;
constexpr Milliseconds kSlice{50};

[[noreturn]] void rethrow(const std::string& where, std::exception_ptr error) {
  std::string text;
  try {
    std::rethrow_exception(std::move(error));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    text = e.what();
    text = text.substr(0, text.find('\n'));
  }
  const std::string message = where + " failed in its process group: " + text +
                              ". Look at the other workers' logs; the group cannot be used any more";
  const bool is_timeout = text.find("imed out") != std::string::npos || text.find("imeout") != std::string::npos;
  if (is_timeout) throw Timeout(message);
  throw CommError(message);
}

class C10dWork final : public Work::Impl {
 public:
  C10dWork(std::string where, c10::intrusive_ptr<c10d::Work> work, bool is_host,
           std::shared_ptr<C10dTransport::Abortion> abortion)
      : where_(std::move(where)), work_(std::move(work)), is_host_(is_host), abortion_(std::move(abortion)) {}

  bool advance() override {
    check_aborted();
    if (is_done_) return true;
    if (!work_->isCompleted()) return false;
    finish();
    return true;
  }

  // Device work is ordered by streams: its wait() does not block the host.
  void wait(Milliseconds timeout) override {
    const auto deadline = Clock::now() + timeout;
    while (!is_done_) {
      check_aborted();
      if (!is_host_ || work_->isCompleted()) {
        finish();
      } else if (Clock::now() >= deadline) {
        throw Timeout(where_ + " did not end within " + std::to_string(timeout.count()) +
                      " ms. Look at what the other workers are doing; if they are only slow, raise `timeout`");
      } else {
        WaitHook::call();
        wait_slice(
            std::min(kSlice, std::max(Milliseconds(1), std::chrono::ceil<Milliseconds>(deadline - Clock::now()))));
      }
    }
  }

 private:
  void finish() {
    try {
      work_->wait();
    } catch (...) {
      rethrow(where_, std::current_exception());
    }
    is_done_ = true;
  }

  // A slice that runs out looks like a failed operation; isCompleted() tells them apart.
  void wait_slice(Milliseconds slice) {
    try {
      work_->wait(slice);
    } catch (const std::exception&) {
      if (work_->isCompleted()) finish();
    }
  }

  void check_aborted() {
    if (!abortion_->requested.load()) return;
    const std::lock_guard lock(abortion_->mutex);
    throw CommError(abortion_->reason);
  }

  const std::string where_;
  const c10::intrusive_ptr<c10d::Work> work_;
  const bool is_host_;
  const std::shared_ptr<C10dTransport::Abortion> abortion_;
  bool is_done_ = false;
};

c10d::ReduceOp translate(ReduceOp op) {
  switch (op) {
    case ReduceOp::min:
      return c10d::ReduceOp::MIN;
    case ReduceOp::max:
      return c10d::ReduceOp::MAX;
    default:
      return c10d::ReduceOp::SUM;
  }
}

}  // namespace

C10dTransport::C10dTransport(ProcessGroupPtr group, c10::Device device, bool aborts_group)
    : process_(::getpid()),
      group_(std::move(group)),
      device_(device),
      aborts_group_(aborts_group),
      rank_(group_->getRank()),
      size_(group_->getSize()) {}

// A group's end waits for its threads, which a forked child does not have.
C10dTransport::~C10dTransport() {
  if (::getpid() != process_) group_.release();
}

template <class F>
Work C10dTransport::issue(const char* what, const F& call) {
  std::string where(what);
  where += " at rank ";
  where += std::to_string(rank_);
  c10::intrusive_ptr<c10d::Work> work;
  try {
    work = call();
  } catch (...) {
    rethrow(where, std::current_exception());
  }
  return Work(std::make_shared<C10dWork>(where, std::move(work), device_.is_cpu(), abortion_));
}

Work C10dTransport::all_reduce(const at::Tensor& tensor, ReduceOp op) {
  return issue("all_reduce", [&] {
    std::vector<at::Tensor> tensors{tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = translate(op);
    return group_->allreduce(tensors, options);
  });
}

Work C10dTransport::broadcast(const at::Tensor& tensor, int source) {
  return issue("broadcast", [&] {
    std::vector<at::Tensor> tensors{tensor};
    c10d::BroadcastOptions options;
    options.rootRank = source;
    return group_->broadcast(tensors, options);
  });
}

Work C10dTransport::gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input) {
  return issue("all_gather", [&] {
    std::vector<std::vector<at::Tensor>> lists{outputs};
    std::vector<at::Tensor> inputs{input};
    return group_->allgather(lists, inputs);
  });
}

Work C10dTransport::all_to_all(const at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& sizes_out,
                               const std::vector<int64_t>& sizes_in) {
  return issue("all_to_all", [&] {
    at::Tensor into = output;
    at::Tensor from = input;
    std::vector<int64_t> out = sizes_out;
    std::vector<int64_t> in = sizes_in;
    // Of the backend: the group's has another name in each version of torch.
    return group_->getBackend(device_.type())->alltoall_base(into, from, out, in);
  });
}

void C10dTransport::abort(const std::string& reason) noexcept {
  const std::lock_guard lock(abortion_->mutex);
  if (abortion_->requested.load()) return;
  abortion_->reason = reason;
  abortion_->requested.store(true);
  if (aborts_group_ && ::getpid() == process_) group_->getBackend(device_.type())->abort();
}

CommunicatorPtr make_c10d(ProcessGroupPtr group, const C10dOptions& options) {
  return make_exchange_communicator(std::make_shared<C10dTransport>(std::move(group), options.device), options.check,
                                    options.timeout);
}

}  // namespace muster::comm
