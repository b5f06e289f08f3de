#include "strategy/collectives.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <functional>
#include <map>
#include <sstream>

#include "comm/request.h"
#include "comm/text_exchange.h"
#include "core/flat_layout.h"
#include "core/plain_memory.h"
#include "core/replica_context.h"
#include "device/part_timer.h"
#include "muster/error.h"

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
  static at::Tensor forward(AutogradContext* context, const at::Tensor& value, const MeetingPtr& meeting,
                            uint64_t tag) {
    save_meeting(context, meeting, tag);
    auto& group = meeting->group();
    auto work = group.all_gather(as_real(in_plain_memory(value.detach())).contiguous());
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
            at::Tensor()};
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
  std::ostringstream text;
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

Leaves on_device(const Leaves& values, c10::Device device) {
  Leaves moved;
  for (const auto& value : values) moved.push_back(value.to(device));
  return moved;
}

// Where the leaves of the first contribution are; a worker without one gets them on its group's device.
Leaves beside(const Leaves& results, const std::vector<Contribution>& mine, const comm::Communicator& workers) {
  Leaves moved;
  for (size_t i = 0; i < results.size(); ++i) {
    moved.push_back(results[i].to(mine.empty() ? workers.device() : mine.front().values[i].device()));
  }
  return moved;
}

Leaves averageable(const Leaves& values) {
  Leaves floating;
  for (const auto& value : values) {
    const auto dtype = value.scalar_type();
    const bool is_averageable = at::isFloatingType(dtype) || at::isComplexType(dtype);
    floating.push_back(is_averageable ? value : value.to(at::kDouble));
  }
  return floating;
}

// Text form of a structure's leaves: one "dtype dim size..." line each.
std::string header_of(const Leaves& values) {
  std::ostringstream out;
  for (const auto& value : values) {
    out << static_cast<int>(value.scalar_type()) << ' ' << value.dim();
    for (auto size : value.sizes()) out << ' ' << size;
    out << '\n';
  }
  return out.str();
}

Leaves empty_like_header(const std::string& header) {
  Leaves leaves;
  std::istringstream in(header);
  int dtype = 0;
  for (int64_t dim = 0; in >> dtype >> dim;) {
    std::vector<int64_t> sizes(static_cast<size_t>(dim));
    for (auto& size : sizes) in >> size;
    leaves.push_back(at::empty(sizes, static_cast<at::ScalarType>(dtype)));
  }
  return leaves;
}

std::string in_words(const std::string& header) {
  std::string words;
  for (const auto& leaf : empty_like_header(header)) {
    words += (words.empty() ? "" : ", ") + std::string(c10::toString(leaf.scalar_type())) + c10::str(leaf.sizes());
  }
  return "(" + words + ")";
}

// Every contribution of every worker, in replica order: values travel as they are, so that each rank adds them itself
// along the tree. Collectives outside a step carry few bytes.
struct Gathered {
  std::vector<Leaves> values;
  std::vector<double> weights;
};

Gathered gather_contributions(comm::Communicator& workers, const std::vector<Contribution>& mine,
                              bool rows_may_differ) {
  std::ostringstream text;
  text << std::hexfloat;
  for (const auto& contribution : mine) {
    text << contribution.weight << '\n' << contribution.values.size() << '\n' << header_of(contribution.values);
  }
  const auto headers = exchange_texts(workers, text.str());
  Gathered gathered;
  std::vector<std::pair<size_t, std::string>> shapes;  // worker, header
  for (size_t worker = 0; worker < headers.size(); ++worker) {
    std::istringstream in(headers[worker]);
    std::string line;
    while (std::getline(in, line)) {
      gathered.weights.push_back(std::strtod(line.c_str(), nullptr));
      std::getline(in, line);
      std::string header;
      for (auto leaves = std::stoul(line); leaves > 0; --leaves) {
        std::getline(in, line);
        header += line + '\n';
      }
      shapes.emplace_back(worker, header);
    }
  }
  if (shapes.empty()) throw InvalidArgument("no replica has a value to reduce or gather; every part was empty");
  const auto comparable = [&](const std::string& header) {
    if (!rows_may_differ) return header;
    auto leaves = empty_like_header(header);
    for (auto& leaf : leaves) {
      if (leaf.dim() > 0) leaf = leaf.narrow(0, 0, 0);
    }
    return header_of(leaves);
  };
  for (const auto& [worker, header] : shapes) {
    if (comparable(header) == comparable(shapes.front().second)) continue;
    throw LayoutMismatch("the values differ between ranks: rank " + std::to_string(shapes.front().first) + " has " +
                         in_words(shapes.front().second) + ", rank " + std::to_string(worker) + " has " +
                         in_words(header) + "; pass the same structure, shapes and dtypes everywhere");
  }
  size_t own = 0;
  for (const auto& [worker, header] : shapes) {
    auto leaves = static_cast<int>(worker) == workers.rank() ? mine[own++].values : empty_like_header(header);
    for (auto& leaf : leaves) {
      leaf = in_plain_memory(leaf.detach().cpu()).contiguous();
      if (workers.size() > 1 && leaf.numel() > 0) {
        if (static_cast<int>(worker) == workers.rank()) leaf = leaf.clone();
        workers.broadcast(as_real(leaf), static_cast<int>(worker)).wait();
      }
    }
    gathered.values.push_back(std::move(leaves));
  }
  return gathered;
}

// Complex numbers have no order.
void check_order(const Leaves& values, ReduceOp op) {
  if (op != ReduceOp::min && op != ReduceOp::max) return;
  for (const auto& value : values) {
    if (!value.is_complex()) continue;
    throw InvalidArgument(std::string("complex numbers have no ") + (op == ReduceOp::min ? "minimum" : "maximum") +
                          "; reduce their abs(), or their real and imaginary parts");
  }
}

at::Tensor combine(const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  switch (op) {
    case ReduceOp::min:
      return at::minimum(a, b);
    case ReduceOp::max:
      return at::maximum(a, b);
    default:
      return a + b;
  }
}

at::Tensor reduce_along_tree(std::vector<at::Tensor> level, ReduceOp op) {
  while (level.size() > 1) {
    std::vector<at::Tensor> next;
    for (size_t i = 0; i + 1 < level.size(); i += 2) next.push_back(combine(level[i], level[i + 1], op));
    if (level.size() % 2 != 0) next.push_back(level.back());
    level = std::move(next);
  }
  return level.front();
}

}  // namespace

Leaves reduce_in_step(comm::Communicator& group, const Leaves& given, ReduceOp op, const at::Tensor& weight) {
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
  const auto share = weight.detach().to(group.device(), at::kDouble);
  const auto total = all_reduce(group, share, ReduceOp::sum, meeting->next_tag());
  return by_dtype(averageable(values), [&](const at::Tensor& joined, uint64_t shapes) {
    const auto real = c10::toRealValueType(joined.scalar_type());
    return Sum::apply(joined * share.to(real), meeting, meeting->next_tag(shapes)) / total.to(real);
  });
}

Leaves gather_in_step(comm::Communicator& group, const Leaves& values) {
  const auto meeting = c10::make_intrusive<Meeting>(group);
  Leaves results;
  for (const auto& value : on_device(values, group.device())) {
    results.push_back(Gather::apply(value.dim() == 0 ? value.unsqueeze(0) : value, meeting, meeting->next_tag()));
  }
  return results;
}

void barrier_in_step(comm::Communicator& group) { wait_in_step(group.barrier()); }

Leaves broadcast_in_step(comm::Communicator& group, const Leaves& values, int source) {
  if (source < 0 || source >= group.size()) {
    throw InvalidArgument("source replica " + std::to_string(source) + " does not exist; there are " +
                          std::to_string(group.size()));
  }
  const auto meeting = c10::make_intrusive<Meeting>(group);
  return by_dtype(on_device(values, group.device()), [&](const at::Tensor& joined, uint64_t shapes) {
    return Broadcast::apply(joined, meeting, meeting->next_tag(shapes), source);
  });
}

Leaves reduce_over_workers(comm::Communicator& workers, const std::vector<Contribution>& mine, ReduceOp op) {
  const at::NoGradGuard no_grad;
  for (const auto& contribution : mine) check_order(contribution.values, op);
  auto gathered = gather_contributions(workers, mine, /*rows_may_differ=*/false);
  double total = 0;
  for (double weight : gathered.weights) total += weight;
  Leaves results;
  for (size_t leaf = 0; leaf < gathered.values.front().size(); ++leaf) {
    std::vector<at::Tensor> terms;
    for (size_t i = 0; i < gathered.values.size(); ++i) {
      auto value = gathered.values[i][leaf];
      if (op == ReduceOp::mean) {
        value = averageable({value}).front() * gathered.weights[i];
      }
      terms.push_back(std::move(value));
    }
    auto result = reduce_along_tree(std::move(terms), op);
    results.push_back(op == ReduceOp::mean ? result / total : result);
  }
  return beside(results, mine, workers);
}

Leaves gather_over_workers(comm::Communicator& workers, const std::vector<Contribution>& mine) {
  const at::NoGradGuard no_grad;
  const auto gathered = gather_contributions(workers, mine, /*rows_may_differ=*/true);
  Leaves results;
  for (size_t leaf = 0; leaf < gathered.values.front().size(); ++leaf) {
    std::vector<at::Tensor> parts;
    for (const auto& values : gathered.values) {
      parts.push_back(values[leaf].dim() == 0 ? values[leaf].unsqueeze(0) : values[leaf]);
    }
    results.push_back(at::cat(parts));
  }
  return beside(results, mine, workers);
}

Leaves broadcast_over_workers(comm::Communicator& workers, const Leaves& mine, int source) {
  if (source < 0 || source >= workers.size()) {
    throw InvalidArgument("source rank " + std::to_string(source) + " does not exist; there are " +
                          std::to_string(workers.size()));
  }
  const at::NoGradGuard no_grad;
  const auto headers = exchange_texts(workers, workers.rank() == source ? header_of(mine) : std::string());
  Leaves results = workers.rank() == source ? mine : empty_like_header(headers[static_cast<size_t>(source)]);
  for (size_t i = 0; i < results.size(); ++i) {
    auto leaf = results[i].detach().clone(at::MemoryFormat::Contiguous);
    if (leaf.numel() > 0) workers.broadcast(as_real(leaf), source).wait();
    results[i] = i < mine.size() ? leaf.to(mine[i].device()) : leaf;
  }
  return results;
}

}  // namespace muster
