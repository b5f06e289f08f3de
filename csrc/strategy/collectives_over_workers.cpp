#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>

#include <algorithm>
#include <bit>
#include <deque>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "comm/request.h"
#include "comm/text_exchange.h"
#include "core/plain_memory.h"
#include "core/plain_text.h"
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
  TextWriter out;
  for (const auto& value : values) {
    out << static_cast<int>(value.scalar_type()) << ' ' << value.dim();
    for (auto size : value.sizes()) out << ' ' << size;
    out << '\n';
  }
  return out.str();
}

// Without memory.
Leaves empty_like_header(const std::string& header) {
  Leaves leaves;
  TextReader in(header);
  int dtype = 0;
  for (int64_t dim = 0; in >> dtype >> dim;) {
    std::vector<int64_t> sizes(static_cast<size_t>(dim));
    for (auto& size : sizes) in >> size;
    leaves.push_back(at::empty(sizes, at::TensorOptions(at::kMeta).dtype(static_cast<at::ScalarType>(dtype))));
  }
  return leaves;
}

// For a broadcast, which goes another way from device to device than over hosts: also which leaves are on the group's
// device, a line of '1' and '0'.
std::string header_and_places(const Leaves& values, c10::Device device) {
  std::string places;
  for (const auto& value : values) places += value.device() == device ? '1' : '0';
  return places + '\n' + header_of(values);
}

// Where the source has them.
Leaves empty_like_header_and_places(const std::string& text, c10::Device device) {
  const auto places = text.substr(0, text.find('\n'));
  auto leaves = empty_like_header(text.substr(places.size()));
  for (size_t i = 0; i < leaves.size(); ++i) {
    leaves[i] = at::empty_like(leaves[i], at::TensorOptions(places.at(i) == '1' ? device : c10::Device(c10::kCPU)));
  }
  return leaves;
}

std::string in_words(const Leaves& values) {
  std::string words;
  for (const auto& leaf : values) {
    words += (words.empty() ? "" : ", ") + std::string(c10::toString(leaf.scalar_type())) + c10::str(leaf.sizes());
  }
  return "(" + words + ")";
}

// What workers say of their contributions before these travel, in replica order.
struct Headers {
  std::vector<double> weights;
  std::vector<std::pair<int, Leaves>> shapes;  // the worker, and its leaves without memory

  size_t num_leaves() const { return shapes.front().second.size(); }
};

// name(...), as calls are told.
bool is_call(const std::string& line) {
  const auto name = line.substr(0, line.find('('));
  return line.size() < 40 && name.size() < line.size() && line.back() == ')' && !name.empty() &&
         std::all_of(name.begin(), name.end(), [](char c) { return c == '_' || (c >= 'a' && c <= 'z'); });
}

// What each worker says in the same call.
std::vector<std::string> told(comm::Communicator& workers, const std::string& call, const std::string& text) {
  auto texts = exchange_texts(workers, call + '\n' + text);
  for (size_t worker = 0; worker < texts.size(); ++worker) {
    const auto line = texts[worker].substr(0, texts[worker].find('\n'));
    if (line == call) continue;
    throw LayoutMismatch("ranks disagree: rank " + std::to_string(workers.rank()) + " called " + call + ", rank " +
                         std::to_string(worker) + ' ' + (is_call(line) ? line : "another function") +
                         "; call the same on all ranks, in the same order");
  }
  for (auto& each : texts) each.erase(0, call.size() + 1);
  return texts;
}

Headers exchange_headers(comm::Communicator& workers, const std::string& call, const std::vector<Contribution>& mine,
                         bool rows_may_differ) {
  TextWriter text;
  for (const auto& contribution : mine) {
    text << exact_text(contribution.weight) << '\n'
         << contribution.values.size() << '\n'
         << header_of(contribution.values);
  }
  const auto texts = told(workers, call, text.str());
  Headers headers;
  for (size_t worker = 0; worker < texts.size(); ++worker) {
    TextReader in(texts[worker]);
    for (std::string line; std::getline(in, line);) {
      std::string_view weight(line);
      headers.weights.push_back(take_number(weight));
      std::getline(in, line);
      std::string header;
      for (auto leaves = std::stoul(line); leaves > 0; --leaves) {
        std::getline(in, line);
        header += line + '\n';
      }
      headers.shapes.emplace_back(static_cast<int>(worker), empty_like_header(header));
    }
  }
  const auto& shapes = headers.shapes;
  if (shapes.empty())
    throw InvalidArgument(
        "no replica has a value to reduce or gather; every part was empty, or its function returned nothing");
  const auto comparable = [&](Leaves leaves) {
    for (auto& leaf : leaves) {
      if (rows_may_differ && leaf.dim() > 0) leaf = leaf.narrow(0, 0, 0);
    }
    return header_of(leaves);
  };
  for (const auto& [worker, leaves] : shapes) {
    const auto& [first, of_first] = shapes.front();
    if (comparable(leaves) == comparable(of_first)) continue;
    const auto whose = [](int rank) { return "rank " + std::to_string(rank); };
    const auto parts = worker == first ? "parts of " + whose(first) + ": one" : "ranks: " + whose(first);
    throw LayoutMismatch("the values differ between " + parts + " has " + in_words(of_first) + ", " +
                         (worker == first ? "another" : whose(worker)) + " has " + in_words(leaves) +
                         "; pass the same structure, shapes and dtypes everywhere");
  }
  return headers;
}

at::Tensor on_host(const at::Tensor& leaf) { return in_plain_memory(leaf.detach().cpu()).contiguous(); }

// One leaf of every contribution of every worker, in replica order: values travel as they are.
Leaves gather_leaf(comm::Communicator& workers, const std::vector<Contribution>& mine, const Headers& headers,
                   size_t index) {
  Leaves gathered;
  size_t own = 0;
  for (const auto& [worker, leaves] : headers.shapes) {
    const bool is_mine = worker == workers.rank();
    auto leaf = is_mine ? on_host(mine[own++].values[index])
                        : at::empty(leaves[index].sizes(), leaves[index].options().device(at::kCPU));
    if (is_mine && leaf.is_alias_of(mine[own - 1].values[index])) leaf = leaf.clone();  // the caller may write it
    if (workers.size() > 1 && leaf.numel() > 0) {
      workers.broadcast(as_real(leaf), worker).wait();
    }
    gathered.push_back(std::move(leaf));
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

// Whether each worker's contributions are a whole part of the tree of sums.
bool are_subtrees(const Headers& headers, int num_workers) {
  std::vector<size_t> counts(static_cast<size_t>(num_workers), 0);
  for (const auto& shape : headers.shapes) ++counts[static_cast<size_t>(shape.first)];
  return std::has_single_bit(counts.front()) &&
         std::all_of(counts.begin(), counts.end(), [&](size_t count) { return count == counts.front(); });
}

// A dtype of which a communicator that adds along the tree gives the bits of torch's sums along it. (A process group
// that the program has given adds in an order of its own, of gradients as well.)
bool is_summed_alike(at::ScalarType dtype) {
  const auto real = c10::toRealValueType(dtype);
  return real == at::kFloat || real == at::kDouble || real == at::kInt || real == at::kLong;
}

// What of `term`, of weight `weight`, is added up: of low precision in fp32, since times a weight it may not fit.
at::Tensor weighted(const at::Tensor& term, ReduceOp op, double weight) {
  if (op != ReduceOp::mean) return term;
  const auto wide = term.to(at::toOpMathType(dtype_of_mean(term.scalar_type())));
  return weight == 0 ? at::zeros_like(wide) : wide * weight;  // NaN, of no sample say, counts for nothing
}

// Small leaves of one dtype as one, so that they travel at once.
class PackedLeaves {
 public:
  // `leaves`: without memory.
  explicit PackedLeaves(Leaves leaves) : leaves_(std::move(leaves)) {
    constexpr int64_t kSmall = 4096;  // elements
    std::map<at::ScalarType, size_t> groups;
    for (size_t i = 0; i < leaves_.size(); ++i) {
      const bool is_small = leaves_[i].numel() <= kSmall;
      const auto [group, is_new] =
          is_small ? groups.emplace(leaves_[i].scalar_type(), packed_.size()) : std::pair(groups.end(), true);
      if (is_new) packed_.emplace_back();
      packed_[is_small ? group->second : packed_.size() - 1].push_back(i);
    }
  }

  // Of leaves of those shapes, with memory or without.
  Leaves pack(const Leaves& leaves) const {
    Leaves result;
    for (const auto& group : packed_) {
      if (group.size() == 1) {
        result.push_back(leaves[group.front()]);
        continue;
      }
      Leaves flat;
      for (const size_t i : group) flat.push_back((leaves[i].is_meta() ? leaves[i] : on_host(leaves[i])).view({-1}));
      result.push_back(at::cat(flat));
    }
    return result;
  }

  Leaves unpack(const Leaves& results) const {
    Leaves leaves(leaves_.size());
    for (size_t p = 0; p < packed_.size(); ++p) {
      int64_t begin = 0;
      for (const size_t i : packed_[p]) {
        const auto& like = leaves_[i];
        const bool is_alone = packed_[p].size() == 1;
        leaves[i] = is_alone ? results[p] : results[p].narrow(0, begin, like.numel()).view(like.sizes()).clone();
        begin += like.numel();
      }
    }
    return leaves;
  }

 private:
  const Leaves leaves_;
  std::vector<std::vector<size_t>> packed_;  // the leaves of each
};

// The sum over all workers of what each has added up of its own terms, or its mean, by pieces: while some are under way
// this worker adds up the next.
at::Tensor sum_over_workers(comm::Communicator& workers, const Leaves& terms, const std::vector<double>& weights,
                            ReduceOp op, double total) {
  constexpr int64_t kPiece = 1 << 20;  // elements
  constexpr size_t kUnderWay = 8;      // pieces
  const auto summed = weighted(terms.front().view({-1}).narrow(0, 0, 0), op, 1).options();
  const at::Tensor result = at::empty(terms.front().sizes(), summed);
  std::deque<std::pair<comm::Work, at::Tensor>> under_way;
  const auto take = [&] {
    auto [work, piece] = std::move(under_way.front());
    under_way.pop_front();
    work.wait();
    if (op == ReduceOp::mean) piece.div_(total);
  };
  for (int64_t begin = 0; begin < result.numel(); begin += kPiece) {
    const int64_t size = std::min(kPiece, result.numel() - begin);
    const auto part = [&](const at::Tensor& whole) { return whole.view({-1}).narrow(0, begin, size); };
    Leaves level;
    for (size_t i = 0; i < terms.size(); ++i) level.push_back(weighted(part(terms[i]), op, weights[i]));
    if (under_way.size() == kUnderWay) take();
    const at::Tensor piece = part(result);
    piece.copy_(reduce_along_tree(std::move(level), ReduceOp::sum));
    under_way.emplace_back(workers.all_reduce(as_real(piece).view({-1}), ReduceOp::sum), piece);
  }
  while (!under_way.empty()) take();
  return result;
}

}  // namespace

Leaves reduce_over_workers(comm::Communicator& workers, const std::vector<Contribution>& given, ReduceOp op) {
  const at::NoGradGuard no_grad;
  for (const auto& contribution : given) {
    check_dense(contribution.values);
    check_order(contribution.values, op);
  }
  auto headers =
      exchange_headers(workers, std::string("reduce(") + comm::name_of(op) + ")", given, /*rows_may_differ=*/false);
  const PackedLeaves packed(headers.shapes.front().second);
  auto mine = given;
  for (auto& contribution : mine) contribution.values = packed.pack(contribution.values);
  for (auto& shape : headers.shapes) shape.second = packed.pack(shape.second);
  const double total = std::accumulate(headers.weights.begin(), headers.weights.end(), 0.0);
  const bool adds_up = op == ReduceOp::sum || op == ReduceOp::mean;
  const bool sums_travel = workers.size() > 1 && adds_up && are_subtrees(headers, workers.size());
  Leaves results;
  for (size_t leaf = 0; leaf < headers.num_leaves(); ++leaf) {
    if (sums_travel && is_summed_alike(mine.front().values[leaf].scalar_type())) {
      Leaves terms;
      std::vector<double> weights;
      for (const auto& contribution : mine) {
        terms.push_back(on_host(contribution.values[leaf]));
        weights.push_back(contribution.weight);
      }
      results.push_back(sum_over_workers(workers, terms, weights, op, total));
      continue;
    }
    auto terms = gather_leaf(workers, mine, headers, leaf);
    const auto dtype = dtype_of_mean(terms.front().scalar_type());
    for (size_t i = 0; i < terms.size(); ++i) terms[i] = weighted(terms[i], op, headers.weights[i]);
    auto result = reduce_along_tree(std::move(terms), op);
    results.push_back(op == ReduceOp::mean ? (result / total).to(dtype) : result);
  }
  return beside(packed.unpack(results), given, workers);
}

Leaves gather_over_workers(comm::Communicator& workers, const std::vector<Contribution>& mine) {
  const at::NoGradGuard no_grad;
  for (const auto& contribution : mine) check_dense(contribution.values);
  const auto headers = exchange_headers(workers, "gather()", mine, /*rows_may_differ=*/true);
  Leaves results;
  for (size_t leaf = 0; leaf < headers.num_leaves(); ++leaf) {
    auto parts = gather_leaf(workers, mine, headers, leaf);
    for (auto& part : parts) {
      if (part.dim() == 0) part = part.unsqueeze(0);
    }
    results.push_back(at::cat(parts));
  }
  return beside(results, mine, workers);
}

namespace {

Leaves leaves_of_source(comm::Communicator& workers, const Leaves& mine, int source, bool source_has_them) {
  if (source < 0 || source >= workers.size()) {
    throw InvalidArgument("source rank " + std::to_string(source) + " does not exist; there are " +
                          std::to_string(workers.size()));
  }
  const at::NoGradGuard no_grad;
  if (workers.rank() == source) check_dense(mine);
  const auto headers = told(workers, "broadcast(source=" + std::to_string(source) + ")",
                            workers.rank() == source ? header_and_places(mine, workers.device()) : std::string());
  const bool is_source = workers.rank() == source;
  Leaves results;
  const auto leaves =
      is_source ? mine : empty_like_header_and_places(headers[static_cast<size_t>(source)], workers.device());
  for (const auto& each : leaves) {
    const bool only_sends = is_source && source_has_them;
    const auto leaf = only_sends ? each.detach().contiguous() : each.detach().clone(at::MemoryFormat::Contiguous);
    if (leaf.numel() > 0) workers.broadcast(as_real(leaf), source).wait();
    if (only_sends) continue;
    const bool goes_beside = results.size() < mine.size() && mine[results.size()].defined();
    results.push_back(goes_beside ? leaf.to(mine[results.size()].device()) : leaf);
  }
  return results;
}

}  // namespace

Leaves broadcast_over_workers(comm::Communicator& workers, const Leaves& mine, int source) {
  return leaves_of_source(workers, mine, source, /*source_has_them=*/false);
}

Leaves send_over_workers(comm::Communicator& workers, const Leaves& mine, int source) {
  return leaves_of_source(workers, mine, source, /*source_has_them=*/true);
}

}  // namespace muster
