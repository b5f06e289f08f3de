#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <functional>
#include <map>

#include "comm/request.h"
#include "core/flat_layout.h"
#include "core/plain_memory.h"
#include "core/plain_text.h"
#include "core/replica_context.h"
#include "device/part_timer.h"
#include "muster/batch.h"
#include "muster/error.h"
#include "strategy/collectives.h"
#include "window/device_numbers.h"

namespace muster {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// In a step: the time that the replica waits for others is not its part's.
void wait_in_step(comm::Work work) {
  const auto replica = current_replica();
  const auto timer = replica ? replica->timer : nullptr;
  if (timer) timer->stop();
  try {
    work.wait();
  } catch (...) {
    if (replica) replica->wait_error = std::current_exception();
    if (timer) timer->start();
    throw;
  }
  if (timer) timer->start();
}

// The call in which replicas meet, as nodes of the graph know it. The graph may outlive the call and the strategy.
class Meeting : public torch::CustomClassHolder {
 public:
  explicit Meeting(comm::Communicator& group) : group_(group), replica_(checked(current_replica())) {}

  /// Throws InvalidArgument where the call has ended: no peer would come.
  comm::Communicator& group() const {
    const auto issuer = replica_.lock();
    if (issuer && issuer == current_replica()) return group_;
    throw InvalidArgument(
        "backward came to a reduce, gather or broadcast of a step that has ended, where no replica waits for another; "
        "detach() what is kept from one step to the next");
  }

  /// The next collective of the call, equal on the replicas that ask for the same ones; `shapes`: of its values.
  uint64_t next_tag(uint64_t shapes = 0) const { return derived_tag(shapes + ++group_call()->collectives); }

  /// Of what backward of that collective does.
  static uint64_t derived_tag(uint64_t tag) noexcept { return (tag ^ (tag >> 29)) * 0x9e3779b97f4a7c15ULL + 1; }

 private:
  static std::shared_ptr<ReplicaContext> checked(std::shared_ptr<ReplicaContext> replica) {
    if (!replica) throw InvalidArgument("collectives between replicas belong into a step; call them in its function");
    return replica;
  }
  std::shared_ptr<ReplicaContext> group_call() const { return checked(replica_.lock()); }

  comm::Communicator& group_;  // lives as long as the call
  const std::weak_ptr<ReplicaContext> replica_;
};

using MeetingPtr = c10::intrusive_ptr<Meeting>;

at::Tensor all_reduce(comm::Communicator& group, const at::Tensor& value, ReduceOp op, uint64_t tag) {
  auto result = value.detach().clone(at::MemoryFormat::Contiguous);
  wait_in_step(group.all_reduce(as_real(result), op, tag));
  return result;
}

void save_meeting(AutogradContext* context, const MeetingPtr& meeting, uint64_t tag) {
  context->saved_data["meeting"] = c10::IValue::make_capsule(meeting);
  context->saved_data["tag"] = static_cast<int64_t>(tag);
}

// Throws as Meeting::group.
std::pair<MeetingPtr, uint64_t> saved_meeting(AutogradContext* context) {
  auto meeting = c10::static_intrusive_pointer_cast<Meeting>(context->saved_data["meeting"].toCapsule());
  meeting->group();
  const auto tag = static_cast<uint64_t>(context->saved_data["tag"].toInt());
  return {std::move(meeting), Meeting::derived_tag(tag)};
}

// Every backward is made of these functions again, so that it can be differentiated, too; its collectives carry tags of
// their own, since replicas whose graphs differ may come to others first.
struct Sum : Function<Sum> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& value, const MeetingPtr& meeting,
                            uint64_t tag) {
    save_meeting(context, meeting, tag);
    return all_reduce(meeting->group(), value, ReduceOp::sum, tag);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto [meeting, tag] = saved_meeting(context);
    return {Sum::apply(gradients[0], meeting, tag), at::Tensor(), at::Tensor()};
  }
};

struct Extremum : Function<Extremum> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& value, const MeetingPtr& meeting, uint64_t tag,
                            bool is_max) {
    save_meeting(context, meeting, tag);
    auto result = all_reduce(meeting->group(), value, is_max ? ReduceOp::max : ReduceOp::min, tag);
    context->save_for_backward({value, result});
    return result;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto [meeting, tag] = saved_meeting(context);
    const auto saved = context->get_saved_variables();
    const auto attains = saved[0].eq(saved[1]).to(gradients[0].scalar_type());
    const auto holders = all_reduce(meeting->group(), attains, ReduceOp::sum, Meeting::derived_tag(tag));
    const auto gradient = Sum::apply(gradients[0], meeting, tag);
    return {gradient * attains / holders, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

struct Gather : Function<Gather> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& value, const MeetingPtr& meeting, uint64_t tag,
                            comm::GatherSizes sizes) {
    save_meeting(context, meeting, tag);
    auto& group = meeting->group();
    auto work = group.all_gather(as_real(in_plain_memory(value.detach())).contiguous(), sizes);
    wait_in_step(work);
    const auto outputs = work.outputs();
    int64_t before = 0;
    std::vector<at::Tensor> parts;
    for (size_t r = 0; r < outputs.size(); ++r) {
      if (!outputs[r].defined()) continue;
      if (static_cast<int>(r) < group.rank()) before += outputs[r].size(0);
      parts.push_back(outputs[r]);
    }
    context->saved_data["before"] = before;
    context->saved_data["rows"] = value.size(0);
    const auto whole = at::cat(parts);
    return value.is_complex() ? at::view_as_complex(whole) : whole;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto [meeting, tag] = saved_meeting(context);
    const auto sums = Sum::apply(gradients[0], meeting, tag);
    return {sums.narrow(0, context->saved_data["before"].toInt(), context->saved_data["rows"].toInt()), at::Tensor(),
            at::Tensor(), at::Tensor()};
  }
};

struct Broadcast : Function<Broadcast> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& value, const MeetingPtr& meeting, uint64_t tag,
                            int64_t source) {
    save_meeting(context, meeting, tag);
    context->saved_data["source"] = source;
    auto result = value.detach().clone(at::MemoryFormat::Contiguous);
    wait_in_step(meeting->group().broadcast(as_real(result), static_cast<int>(source)));
    return result;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients);
};

// The sum at one replica, zeros at the others: what a broadcast is transposed.
struct SumAt : Function<SumAt> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& value, const MeetingPtr& meeting, uint64_t tag,
                            int64_t root) {
    save_meeting(context, meeting, tag);
    context->saved_data["root"] = root;
    auto& group = meeting->group();
    auto sums = all_reduce(group, value, ReduceOp::sum, tag);
    return root == group.rank() ? sums : sums.zero_();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto [meeting, tag] = saved_meeting(context);
    return {Broadcast::apply(gradients[0], meeting, tag, context->saved_data["root"].toInt()), at::Tensor(),
            at::Tensor(), at::Tensor()};
  }
};

variable_list Broadcast::backward(AutogradContext* context, const variable_list& gradients) {
  const auto [meeting, tag] = saved_meeting(context);
  return {SumAt::apply(gradients[0], meeting, tag, context->saved_data["source"].toInt()), at::Tensor(), at::Tensor(),
          at::Tensor()};
}

// Of the sizes of values that travel as one.
uint64_t digest_of(const Leaves& values) {
  TextWriter text;
  for (const auto& value : values) text << value.sizes();
  return stable_hash(text.str());
}

// Applies `transform` to one flat tensor per dtype and gives the leaves their shapes back.
// A single one keeps its shape, which replicas compare; that of several is in `shapes`.
Leaves by_dtype(const Leaves& values,
                const std::function<at::Tensor(const at::Tensor& joined, uint64_t shapes)>& transform) {
  std::map<at::ScalarType, std::vector<size_t>> groups;
  for (size_t i = 0; i < values.size(); ++i) groups[values[i].scalar_type()].push_back(i);
  Leaves results(values.size());
  for (const auto& [dtype, members] : groups) {
    if (members.size() == 1 && values[members.front()].dim() < comm::Request::kMaxDims) {
      results[members.front()] = transform(values[members.front()], 0);
      continue;
    }
    Leaves flat;
    Leaves given;
    for (size_t i : members) {
      given.push_back(values[i]);
      flat.push_back(values[i].reshape({-1}));
    }
    const auto result = transform(at::cat(flat), digest_of(given));
    int64_t offset = 0;
    for (size_t i : members) {
      results[i] = result.narrow(0, offset, values[i].numel()).view(values[i].sizes());
      offset += values[i].numel();
    }
  }
  return results;
}

// From pageable memory of the host a copy would wait for the device.
at::Tensor on_device(const at::Tensor& value, c10::Device device) {
  if (value.device() == device || device.is_cpu() || value.requires_grad()) return value.to(device);
  return value.numel() == 1 ? number_on(device, value).view(value.sizes()) : detail::placed_tensor(value, device);
}

Leaves on_device(const Leaves& values, c10::Device device) {
  Leaves moved;
  for (const auto& value : values) moved.push_back(on_device(value, device));
  return moved;
}

}  // namespace

Leaves reduce_in_step(comm::Communicator& group, const Leaves& given, ReduceOp op, const at::Tensor& weight) {
  check_dense(given);
  const auto values = on_device(given, group.device());
  const auto meeting = c10::make_intrusive<Meeting>(group);
  check_order(values, op);
  switch (op) {
    case ReduceOp::sum:
      return by_dtype(values, [&](const at::Tensor& joined, uint64_t shapes) {
        return Sum::apply(joined, meeting, meeting->next_tag(shapes));
      });
    case ReduceOp::min:
    case ReduceOp::max:
      return by_dtype(values, [&](const at::Tensor& joined, uint64_t shapes) {
        return Extremum::apply(joined, meeting, meeting->next_tag(shapes), op == ReduceOp::max);
      });
    case ReduceOp::mean:
      break;
  }
  const auto share = on_device(weight.detach(), group.device()).to(at::kDouble);
  const auto total = all_reduce(group, share, ReduceOp::sum, meeting->next_tag());
  Leaves floating;
  for (const auto& value : values) floating.push_back(value.to(dtype_of_mean(value.scalar_type())));
  return by_dtype(floating, [&](const at::Tensor& joined, uint64_t shapes) {
    const auto wide = joined.to(at::toOpMathType(joined.scalar_type()));  // times a weight it may not fit its dtype
    const auto real = c10::toRealValueType(wide.scalar_type());
    // NaN of weight 0, of no sample say, counts for nothing.
    const auto counted = at::where(share.ne(0), wide, at::zeros({}, wide.options()));
    const auto sum = Sum::apply(counted * share.to(real), meeting, meeting->next_tag(shapes));
    return (sum / total.to(real)).to(joined.scalar_type());
  });
}

Leaves gather_in_step(comm::Communicator& group, const Leaves& values, comm::GatherSizes sizes) {
  check_dense(values);
  const auto meeting = c10::make_intrusive<Meeting>(group);
  Leaves results;
  for (const auto& value : on_device(values, group.device())) {
    const auto rows = value.dim() == 0 ? value.unsqueeze(0) : value;
    results.push_back(Gather::apply(rows, meeting, meeting->next_tag(), sizes));
  }
  return results;
}

void barrier_in_step(comm::Communicator& group) { wait_in_step(group.barrier()); }

SumInBackward sum_in_backward(comm::Communicator& group) {
  const auto meeting = c10::make_intrusive<Meeting>(group);
  const uint64_t tag = Meeting::derived_tag(meeting->next_tag());
  return [meeting, tag](const at::Tensor& value) { return all_reduce(meeting->group(), value, ReduceOp::sum, tag); };
}

Leaves broadcast_in_step(comm::Communicator& group, const Leaves& values, int source) {
  if (source < 0 || source >= group.size()) {
    throw InvalidArgument("source replica " + std::to_string(source) + " does not exist; there are " +
                          std::to_string(group.size()));
  }
  check_dense(values);
  const auto meeting = c10::make_intrusive<Meeting>(group);
  return by_dtype(on_device(values, group.device()), [&](const at::Tensor& joined, uint64_t shapes) {
    return Broadcast::apply(joined, meeting, meeting->next_tag(shapes), source);
  });
}

}  // namespace muster
