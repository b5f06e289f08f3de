#include "comm/nccl/communicator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "comm/nccl/arena.h"
#include "comm/nccl/arithmetic.h"
#include "comm/nccl/launcher.h"
#include "comm/nccl/members.h"
#include "comm/nccl/roll.h"
#include "comm/nccl/roll_call.h"
#include "comm/nccl/unique_id.h"
#include "comm/nccl/work.h"
#include "comm/ready_work.h"
#include "muster/error.h"

namespace muster::comm::nccl {
namespace {

size_t bytes_of(const at::Tensor& tensor) { return static_cast<size_t>(tensor.numel()) * tensor.element_size(); }

// An error before a call in progress before success.
Status worse(Status a, Status b) { return a == kSuccess || (a == kInProgress && b != kSuccess) ? b : a; }

// A dense tensor's memory in its own order.
at::Tensor flat(const at::Tensor& tensor) { return tensor.as_strided({tensor.numel()}, {1}); }

size_t count_of(const at::Tensor& tensor) { return static_cast<size_t>(tensor.numel()); }

at::IntArrayRef shape_of(const Request& request) { return {request.sizes, static_cast<size_t>(request.ndim)}; }

/// A rank's place in its group, which it leaves with its last handle.
struct Seat {
  Seat(std::shared_ptr<Launcher> of, int rank_of_process, c10::Device device, size_t arena_bytes)
      : launcher(std::move(of)), local(rank_of_process), arena(launcher, local, device, arena_bytes) {}
  ~Seat() { launcher->leave(local); }
  Seat(const Seat&) = delete;
  Seat& operator=(const Seat&) = delete;

  const std::shared_ptr<Launcher> launcher;
  const int local;
  Arena arena;
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::shared_ptr<Seat> seat, c10::Device device, CommunicatorPtr control, bool check)
      : Communicator({.rank = seat->launcher->clique().options().first_rank + seat->local,
                      .size = seat->launcher->clique().options().size,
                      .device = device}),
        seat_(std::move(seat)),
        launcher_(*seat_->launcher),
        nccl_(launcher_.clique().nccl()),
        local_(seat_->local),
        timeout_(launcher_.clique().options().timeout),
        check_(check),
        roll_call_(launcher_.shared_clique(), std::move(control),
                   [this](const Request& request, const Roll& roll) { issue_stand_in(request, roll); }) {}

  const std::shared_ptr<Seat>& seat() const noexcept { return seat_; }

  at::Tensor allocate(int64_t numel, at::ScalarType dtype) override {
    return seat_->arena.allocate(numel, dtype, timeout_);
  }

  Work all_reduce(const at::Tensor& tensor, ReduceOp op, uint64_t tag, const Receivers& receivers) override;
  Work broadcast(const at::Tensor& tensor, int source) override;
  Work all_gather(const at::Tensor& input, GatherSizes sizes) override;
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) override;
  Work barrier() override;

  void begin_scope(uint64_t scope, QueuedOperations* queue) override;
  Work end_scope(ScopeEnd end, const std::string& reason) override;
  void abort(const std::string& reason) noexcept override;

 private:
  using Encode = std::function<Status(Comm, Stream)>;

  Work issue(const Request& request, std::vector<at::Tensor> tensors, Encode encode,
             NcclWork::Joins joins = NcclWork::Joins::stream, std::vector<at::Tensor> outputs = {});
  void run_among(const Roll& roll, const Request& request, std::vector<at::Tensor> tensors, Encode encode);
  void check_device(const at::Tensor& tensor) const;
  void check_host_may_wait(const std::string& what) const;
  Roll agree(Request& request, GatherSizes sizes = GatherSizes::any);
  Roll gather_cards_on_device(const Request& request);
  Work note_issued(Work work);
  std::vector<at::Tensor> swap(const at::Tensor& tensor, const Request& request, const Roll& roll);

  // What the roll has agreed on.
  Work issue_all_reduce(const Request& request, const Roll& roll, const at::Tensor& tensor,
                        const Receivers& receivers = {});
  Work issue_broadcast(const Request& request, const Roll& roll, const at::Tensor& tensor);
  Work issue_all_gather(const Request& request, const Roll& roll, const at::Tensor& input);
  Work issue_reduce_scatter(const Request& request, const Roll& roll, const at::Tensor& output,
                            const at::Tensor& input);
  Work issue_barrier(const Request& request, const Roll& roll);
  void issue_stand_in(const Request& request, const Roll& roll);

  const std::shared_ptr<Seat> seat_;
  Launcher& launcher_;
  const NcclApi& nccl_;
  const int local_;
  const Milliseconds timeout_;
  const bool check_;
  RollCall roll_call_;
};

// What is launched may outlive the communicator: it holds the clique's table, never `this`.
Work NcclCommunicator::issue(const Request& request, std::vector<at::Tensor> tensors, Encode encode,
                             NcclWork::Joins joins, std::vector<at::Tensor> outputs) {
  LaunchPtr launch = launcher_.post(local_, {request, std::move(encode), std::move(tensors), {}});
  roll_call_.note_posted();
  return Work(std::make_shared<NcclWork>(seat_->launcher, local_, std::move(launch), joins, std::move(outputs)));
}

void NcclCommunicator::check_device(const at::Tensor& tensor) const {
  if (!tensor.defined() || tensor.device() == device()) return;
  throw InvalidArgument("rank " + std::to_string(rank()) + " communicates tensors on " + device().str() +
                        "; got one on " + tensor.device().str() + ", move it first");
}

// What is captured runs when its graph does, so that the host would wait until the timeout.
void NcclCommunicator::check_host_may_wait(const std::string& what) const {
  const Clique& clique = launcher_.clique();
  const DeviceApi& api = clique.device();
  const int index = clique.options().devices[static_cast<size_t>(local_)];
  const DeviceScope scope(api, index);
  if (!api.is_capturing(api.current_stream(index))) return;
  throw InvalidArgument(what +
                        " waits on the host for the device, which no CUDA graph can capture; call it before or "
                        "after the capture");
}

// --- agreement -----------------------------------------------------------------------------------------------------

// In a scope: note_issued() follows.
Roll NcclCommunicator::agree(Request& request, GatherSizes sizes) {
  launcher_.clique().check();
  const bool asks = check_ || roll_call_.is_in_scope() || request.kind == OpKind::all_gather;
  if (!asks) return Roll();
  return roll_call_.has_control() ? roll_call_.call(request, sizes) : gather_cards_on_device(request);
}

Work NcclCommunicator::note_issued(Work work) {
  roll_call_.note_issued();
  return work;
}

Roll NcclCommunicator::gather_cards_on_device(const Request& request) {
  check_host_may_wait(describe(request) + " in a group without a control group");
  const at::Tensor mine = to_tensor(Card{request}).to(device());
  const at::Tensor all = at::empty({size(), mine.numel()}, mine.options());
  Work work = issue(
      request, {mine, all},
      [&nccl = nccl_, mine, all](Comm comm, Stream stream) {
        return nccl.all_gather(mine.const_data_ptr(), all.mutable_data_ptr(), bytes_of(mine), comm, stream);
      },
      NcclWork::Joins::host);
  work.wait(timeout_);
  const at::Tensor host = all.to(at::kCPU);
  Cards cards;
  for (int r = 0; r < size(); ++r) cards.emplace_back(card_in(host.select(0, r)));
  return roll_call_.compare(cards);
}

// Launched, and joined by the current stream, when it returns.
void NcclCommunicator::run_among(const Roll& roll, const Request& request, std::vector<at::Tensor> tensors,
                                 Encode encode) {
  LaunchPart part{request, std::move(encode), std::move(tensors), {}};
  const Clique::Options& options = launcher_.clique().options();
  for (int i = 0; i < launcher_.clique().local_ranks(); ++i) {
    part.takes_part.push_back(roll.is_present(options.first_rank + i));
  }
  const LaunchPtr launch = launcher_.post(local_, std::move(part));
  roll_call_.note_posted();
  launcher_.await_launched(local_, *launch, timeout_);
  launcher_.join(local_, *launch);
}

// --- among those present -------------------------------------------------------------------------------------------

// Every present rank's tensor, in its own shape, on the current stream; undefined for the others.
std::vector<at::Tensor> NcclCommunicator::swap(const at::Tensor& tensor, const Request& request, const Roll& roll) {
  std::vector<at::Tensor> parts(static_cast<size_t>(size()));
  for (int r = 0; r < size(); ++r) {
    if (!roll.is_present(r)) continue;
    const Request& theirs = roll.request_of(r);
    const bool is_gather = request.kind == OpKind::all_gather;
    parts[static_cast<size_t>(r)] = r == rank() ? tensor
                                    : is_gather ? at::empty(shape_of(theirs), tensor.options())
                                                : at::empty({theirs.numel}, tensor.options());
  }
  std::vector<at::Tensor> tensors = parts;
  run_among(roll, request, std::move(tensors), [&nccl = nccl_, parts, me = rank()](Comm comm, Stream stream) {
    Status worst = kSuccess;
    const at::Tensor& mine = parts[static_cast<size_t>(me)];
    for (int r = 0; r < static_cast<int>(parts.size()); ++r) {
      const at::Tensor& theirs = parts[static_cast<size_t>(r)];
      if (r == me || !theirs.defined()) continue;
      if (mine.numel() > 0) worst = worse(worst, nccl.send(mine.const_data_ptr(), bytes_of(mine), r, comm, stream));
      if (theirs.numel() > 0)
        worst = worse(worst, nccl.receive(theirs.mutable_data_ptr(), bytes_of(theirs), r, comm, stream));
    }
    return worst;
  });
  return parts;
}

// --- collectives ---------------------------------------------------------------------------------------------------

Work NcclCommunicator::all_reduce(const at::Tensor& tensor, ReduceOp op, uint64_t tag, const Receivers& receivers) {
  check_device(tensor);
  Request request = all_reduce_request(tensor, op, tag);
  arithmetic_of(tensor.scalar_type(), op);  // throws before peers are asked
  const Roll roll = agree(request);
  return note_issued(issue_all_reduce(request, roll, tensor, receivers));
}

Work NcclCommunicator::issue_all_reduce(const Request& request, const Roll& roll, const at::Tensor& tensor,
                                        const Receivers& receivers) {
  const auto op = static_cast<ReduceOp>(request.reduction);
  if (!roll.is_everyone()) {
    flat(tensor).copy_(reduce_along_tree(swap(flat(tensor), request, roll), op));
    return Work();
  }
  if (tensor.numel() == 0) return issue(request, {}, {});
  // One call of NCCL's for each run, in one group.
  std::vector<OwnedRun> runs = receivers.runs;
  if (runs.empty()) runs = {{kEveryRank, 0, tensor.numel()}};
  const Arithmetic how = arithmetic_of(tensor.scalar_type(), op);
  return issue(request, {tensor}, [&nccl = nccl_, how, tensor, runs = std::move(runs)](Comm comm, Stream stream) {
    Status worst = kSuccess;
    auto* const data = static_cast<std::byte*>(tensor.mutable_data_ptr());
    for (const OwnedRun& run : runs) {
      void* const own = data + static_cast<size_t>(run.begin) * tensor.element_size();
      const auto count = static_cast<size_t>(run.count);
      worst = worse(worst, nccl.reduce(own, own, count, how.type, how.reduction, run.rank, comm, stream));
    }
    return worst;
  });
}

Work NcclCommunicator::broadcast(const at::Tensor& tensor, int source) {
  check_device(tensor);
  Request request = broadcast_request(tensor, source, size());
  const Roll roll = agree(request);
  return note_issued(issue_broadcast(request, roll, tensor));
}

Work NcclCommunicator::issue_broadcast(const Request& request, const Roll& roll, const at::Tensor& tensor) {
  const int source = request.source;
  if (roll.is_everyone()) {
    if (tensor.numel() == 0) return issue(request, {}, {});
    return issue(request, {tensor}, [&nccl = nccl_, source, tensor](Comm comm, Stream stream) {
      void* const data = tensor.mutable_data_ptr();
      return nccl.broadcast(data, data, bytes_of(tensor), source, comm, stream);
    });
  }
  if (!roll.is_present(source) || tensor.numel() == 0) return Work();
  run_among(roll, request, {tensor},
            [&nccl = nccl_, tensor, roll, source, me = rank(), n = size()](Comm comm, Stream stream) {
              const size_t bytes = bytes_of(tensor);
              if (me != source) return nccl.receive(tensor.mutable_data_ptr(), bytes, source, comm, stream);
              Status worst = kSuccess;
              for (int r = 0; r < n; ++r) {
                if (r == me || !roll.is_present(r)) continue;
                worst = worse(worst, nccl.send(tensor.const_data_ptr(), bytes, r, comm, stream));
              }
              return worst;
            });
  return Work();
}

Work NcclCommunicator::all_gather(const at::Tensor& input, GatherSizes sizes) {
  check_device(input);
  Request request = all_gather_request(input);
  const Roll roll = agree(request, sizes);
  return note_issued(issue_all_gather(request, roll, input));
}

Work NcclCommunicator::issue_all_gather(const Request& request, const Roll& roll, const at::Tensor& input) {
  const at::Tensor mine = input.contiguous();
  if (!roll.is_everyone()) {
    std::vector<at::Tensor> parts = swap(mine, request, roll);
    parts[static_cast<size_t>(rank())] = mine.is_same(input) ? mine.clone() : mine;
    return ready_work(std::move(parts));  // the current stream holds it
  }
  std::vector<at::Tensor> parts;
  if (roll.has_equal_sizes()) {
    const at::Tensor all = at::empty({size(), mine.numel()}, mine.options());
    for (int r = 0; r < size(); ++r) parts.push_back(all.select(0, r).view(shape_of(roll.request_of(r))));
    if (mine.numel() == 0) return issue(request, {}, {}, NcclWork::Joins::stream, std::move(parts));
    return issue(
        request, {mine, all},
        [&nccl = nccl_, mine, all](Comm comm, Stream stream) {
          return nccl.all_gather(mine.const_data_ptr(), all.mutable_data_ptr(), bytes_of(mine), comm, stream);
        },
        NcclWork::Joins::stream, std::move(parts));
  }
  for (int r = 0; r < size(); ++r) parts.push_back(at::empty(shape_of(roll.request_of(r)), mine.options()));
  std::vector<at::Tensor> tensors = parts;
  tensors.push_back(mine);
  return issue(
      request, std::move(tensors),
      [&nccl = nccl_, parts, mine, me = rank()](Comm comm, Stream stream) {
        Status worst = kSuccess;
        for (int r = 0; r < static_cast<int>(parts.size()); ++r) {
          const at::Tensor& part = parts[static_cast<size_t>(r)];
          if (part.numel() == 0) continue;
          const void* const source = r == me ? mine.const_data_ptr() : part.const_data_ptr();
          const Status status = nccl.broadcast(source, part.mutable_data_ptr(), bytes_of(part), r, comm, stream);
          worst = worse(worst, status);
        }
        return worst;
      },
      NcclWork::Joins::stream, parts);
}

Work NcclCommunicator::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) {
  check_device(input);
  check_device(output);
  Request request = reduce_scatter_request(output, input, op, size());
  arithmetic_of(input.scalar_type(), op);  // throws before peers are asked
  const Roll roll = agree(request);
  return note_issued(issue_reduce_scatter(request, roll, output, input));
}

Work NcclCommunicator::issue_reduce_scatter(const Request& request, const Roll& roll, const at::Tensor& output,
                                            const at::Tensor& input) {
  const auto op = static_cast<ReduceOp>(request.reduction);
  if (!roll.is_everyone()) {
    const at::Tensor whole = reduce_along_tree(swap(flat(input), request, roll), op);
    flat(output).copy_(whole.narrow(0, output.numel() * rank(), output.numel()));
    return Work();
  }
  if (input.numel() == 0) return issue(request, {}, {});
  const Arithmetic how = arithmetic_of(input.scalar_type(), op);
  return issue(request, {input, output}, [&nccl = nccl_, how, input, output](Comm comm, Stream stream) {
    return nccl.reduce_scatter(input.const_data_ptr(), output.mutable_data_ptr(), count_of(output), how.type,
                               how.reduction, comm, stream);
  });
}

Work NcclCommunicator::barrier() {
  Request request;
  check_host_may_wait("barrier()");
  const Roll roll = agree(request);
  return note_issued(issue_barrier(request, roll));
}

Work NcclCommunicator::issue_barrier(const Request& request, const Roll& roll) {
  if (!roll.is_everyone()) return Work();  // those present have heard of each other, which is the barrier
  const at::Tensor token = at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(device()));
  return issue(
      request, {token},
      [&nccl = nccl_, token](Comm comm, Stream stream) {
        void* const data = token.mutable_data_ptr();
        return nccl.reduce(data, data, 1, DataType::i32, Reduction::sum, kEveryRank, comm, stream);
      },
      NcclWork::Joins::host);
}

// --- scopes and the end --------------------------------------------------------------------------------------------

void NcclCommunicator::begin_scope(uint64_t scope, QueuedOperations* queue) {
  launcher_.clique().check();
  if (!roll_call_.has_control()) {
    throw InvalidArgument(
        "an NCCL group cannot skip a rank by itself, which scopes need; give NcclOptions::control, a group over the "
        "same ranks on the host");
  }
  roll_call_.begin_scope(scope, queue);
}

Work NcclCommunicator::end_scope(ScopeEnd end, const std::string& reason) { return roll_call_.end_scope(end, reason); }

// Zeros, for peers that have issued the operation and get an error later.
void NcclCommunicator::issue_stand_in(const Request& request, const Roll& roll) {
  const auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(request.dtype)).device(device());
  const at::Tensor zeros = at::zeros({request.numel}, options);
  switch (request.kind) {
    case OpKind::all_reduce:
      issue_all_reduce(request, roll, zeros);
      break;
    case OpKind::broadcast:
      issue_broadcast(request, roll, zeros);
      break;
    case OpKind::all_gather:
      issue_all_gather(request, roll, zeros.view(shape_of(request)));
      break;
    case OpKind::reduce_scatter:
      issue_reduce_scatter(request, roll, at::zeros({request.numel / size()}, options), zeros);
      break;
    default:
      issue_barrier(request, roll);
  }
}

void NcclCommunicator::abort(const std::string& reason) noexcept {
  launcher_.clique().fail(std::make_exception_ptr(CommError(reason)));
  roll_call_.abort(reason);
}

}  // namespace

// --- making --------------------------------------------------------------------------------------------------------

std::vector<CommunicatorPtr> make_communicators(const NcclApi& nccl, const DeviceApi& device, c10d::Store& store,
                                                int first_rank, int size, const std::vector<c10::Device>& devices,
                                                const std::vector<NcclOptions>& options) {
  check_arguments(first_rank, size, devices, options);
  Clique::Options clique_options{first_rank, size, {}, options[0].timeout, options[0].blocking};
  for (const c10::Device& d : devices) clique_options.devices.push_back(d.has_index() ? d.index() : 0);
  check_devices_differ(device, first_rank, clique_options.devices, options);
  const UniqueId id = share_id(nccl, store, first_rank, options[0].timeout);
  const auto launcher =
      std::make_shared<Launcher>(std::make_shared<Clique>(nccl, device, id, std::move(clique_options)));
  std::vector<CommunicatorPtr> communicators;
  for (size_t i = 0; i < devices.size(); ++i) {
    auto seat = std::make_shared<Seat>(launcher, static_cast<int>(i), devices[i], options[0].arena_bytes);
    communicators.push_back(
        std::make_shared<NcclCommunicator>(std::move(seat), devices[i], options[i].control, options[0].check));
  }
  return communicators;
}

}  // namespace muster::comm::nccl

namespace muster::comm {

CommunicatorPtr make_another(const CommunicatorPtr& handle, CommunicatorPtr control) {
  const auto nccl = std::dynamic_pointer_cast<nccl::NcclCommunicator>(handle);
  if (!nccl) throw InvalidArgument("make_another takes a handle that make_nccl or make_device_local gave");
  if (!control) throw InvalidArgument("make_another needs a control group, over the same ranks on the host");
  nccl::check_control(*control, handle->rank(), handle->size());
  return std::make_shared<nccl::NcclCommunicator>(nccl->seat(), handle->device(), std::move(control), false);
}

}  // namespace muster::comm
