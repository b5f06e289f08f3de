#include "strategy/collectives.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <functional>
#include <map>
#include <sstream>

#include "core/part_timer.h"
#include "core/replica_context.h"
#include "muster/error.h"
#include "strategy/text_exchange.h"

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
  work.wait();
  if (timer) timer->start();
}

at::Tensor all_reduce(comm::Communicator& group, const at::Tensor& value, ReduceOp op) {
  auto result = value.detach().clone(at::MemoryFormat::Contiguous);
  wait_in_step(group.all_reduce(result, op));
  return result;
}

comm::Communicator& group_of(AutogradContext* context) {
  return *reinterpret_cast<comm::Communicator*>(context->saved_data["group"].toInt());
}

void save_group(AutogradContext* context, comm::Communicator& group) {
  context->saved_data["group"] = reinterpret_cast<int64_t>(&group);
}

struct Sum : Function<Sum> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& value, comm::Communicator* group) {
    save_group(context, *group);
    return all_reduce(*group, value, ReduceOp::sum);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {all_reduce(group_of(context), gradients[0], ReduceOp::sum), at::Tensor()};
  }
};

struct Extremum : Function<Extremum> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& value, comm::Communicator* group, bool is_max) {
    save_group(context, *group);
    auto result = all_reduce(*group, value, is_max ? ReduceOp::max : ReduceOp::min);
    context->save_for_backward({value, result});
    return result;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    auto& group = group_of(context);
    const auto saved = context->get_saved_variables();
    const auto attains = saved[0].eq(saved[1]).to(gradients[0].scalar_type());
    const auto holders = all_reduce(group, attains, ReduceOp::sum);
    const auto gradient = all_reduce(group, gradients[0], ReduceOp::sum);
    return {gradient * attains / holders, at::Tensor(), at::Tensor()};
  }
};

struct Gather : Function<Gather> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& value, comm::Communicator* group) {
    save_group(context, *group);
    auto work = group->all_gather(value.detach().contiguous());
    wait_in_step(work);
    const auto outputs = work.outputs();
    int64_t before = 0;
    std::vector<at::Tensor> parts;
    for (size_t r = 0; r < outputs.size(); ++r) {
      if (!outputs[r].defined()) continue;
      if (static_cast<int>(r) < group->rank()) before += outputs[r].size(0);
      parts.push_back(outputs[r]);
    }
    context->saved_data["before"] = before;
    context->saved_data["rows"] = value.size(0);
    return at::cat(parts);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto sums = all_reduce(group_of(context), gradients[0], ReduceOp::sum);
    return {sums.narrow(0, context->saved_data["before"].toInt(), context->saved_data["rows"].toInt()), at::Tensor()};
  }
};

struct Broadcast : Function<Broadcast> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& value, comm::Communicator* group,
                            int64_t source) {
    save_group(context, *group);
    context->saved_data["source"] = source;
    auto result = value.detach().clone(at::MemoryFormat::Contiguous);
    wait_in_step(group->broadcast(result, static_cast<int>(source)));
    return result;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    auto& group = group_of(context);
    auto sums = all_reduce(group, gradients[0], ReduceOp::sum);
    const bool is_source = context->saved_data["source"].toInt() == group.rank();
    return {is_source ? sums : at::zeros_like(sums), at::Tensor(), at::Tensor()};
  }
};

// Applies `transform` to one flat tensor per dtype and gives the leaves their shapes back.
Leaves by_dtype(const Leaves& values, const std::function<at::Tensor(const at::Tensor& flat)>& transform) {
  std::map<at::ScalarType, std::vector<size_t>> groups;
  for (size_t i = 0; i < values.size(); ++i) groups[values[i].scalar_type()].push_back(i);
  Leaves results(values.size());
  for (const auto& [dtype, members] : groups) {
    std::vector<at::Tensor> flat;
    for (size_t i : members) flat.push_back(values[i].reshape({-1}));
    const auto result = transform(flat.size() == 1 ? flat.front() : at::cat(flat));
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
    floating.push_back(at::isFloatingType(value.scalar_type()) ? value : value.to(at::kDouble));
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
      leaf = leaf.detach().cpu().contiguous();
      if (workers.size() > 1 && leaf.numel() > 0) {
        if (static_cast<int>(worker) == workers.rank()) leaf = leaf.clone();
        workers.broadcast(leaf, static_cast<int>(worker)).wait();
      }
    }
    gathered.values.push_back(std::move(leaves));
  }
  return gathered;
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
  switch (op) {
    case ReduceOp::sum:
      return by_dtype(values, [&](const at::Tensor& flat) { return Sum::apply(flat, &group); });
    case ReduceOp::min:
    case ReduceOp::max:
      return by_dtype(values,
                      [&](const at::Tensor& flat) { return Extremum::apply(flat, &group, op == ReduceOp::max); });
    case ReduceOp::mean:
      break;
  }
  const auto share = weight.detach().to(group.device(), at::kDouble);
  const auto total = all_reduce(group, share, ReduceOp::sum);
  return by_dtype(averageable(values), [&](const at::Tensor& flat) {
    return Sum::apply(flat * share.to(flat.scalar_type()), &group) / total.to(flat.scalar_type());
  });
}

Leaves gather_in_step(comm::Communicator& group, const Leaves& values) {
  Leaves results;
  for (const auto& value : on_device(values, group.device()))
    results.push_back(Gather::apply(value.dim() == 0 ? value.unsqueeze(0) : value, &group));
  return results;
}

void barrier_in_step(comm::Communicator& group) { wait_in_step(group.barrier()); }

Leaves broadcast_in_step(comm::Communicator& group, const Leaves& values, int source) {
  if (source < 0 || source >= group.size()) {
    throw InvalidArgument("source replica " + std::to_string(source) + " does not exist; there are " +
                          std::to_string(group.size()));
  }
  return by_dtype(on_device(values, group.device()),
                  [&](const at::Tensor& flat) { return Broadcast::apply(flat, &group, source); });
}

Leaves reduce_over_workers(comm::Communicator& workers, const std::vector<Contribution>& mine, ReduceOp op) {
  const at::NoGradGuard no_grad;
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
    if (leaf.numel() > 0) workers.broadcast(leaf, source).wait();
    results[i] = i < mine.size() ? leaf.to(mine[i].device()) : leaf;
  }
  return results;
}

}  // namespace muster
