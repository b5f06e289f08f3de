#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>

#include <algorithm>
#include <sstream>

#include "comm/text_exchange.h"
#include "core/plain_memory.h"
#include "muster/error.h"
#include "strategy/collectives.h"

namespace muster {

namespace {

// Where the leaves of the first contribution are; a worker without one gets them on its group's device.
Leaves beside(const Leaves& results, const std::vector<Contribution>& mine, const comm::Communicator& workers) {
  Leaves moved;
  for (size_t i = 0; i < results.size(); ++i) {
    moved.push_back(results[i].to(mine.empty() ? workers.device() : mine.front().values[i].device()));
  }
  return moved;
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
