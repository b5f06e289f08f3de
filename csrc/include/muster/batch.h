// How a batch is divided into parts. One rule of sizes holds everywhere: contiguous parts in replica order whose sizes
// differ by at most one, larger first (9 over 4: 3, 2, 2, 2), or follow the replicas' capacities (Balance::automatic).
//
// Batches that can be divided are a Tensor (along dimension 0), a torch::data::Example of such batches (0-dim tensors
// go to all parts), and a std::vector, which holds one item per sample.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/data/example.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "muster/error.h"

namespace muster::detail {

/// Sizes of `parts` contiguous parts of `n` samples. With capacities, one for each part and summing to 1: those for
/// which the largest size / capacity is smallest, so that replicas of these speeds finish earliest; of two that finish
/// a sample at the same time, the first gets it. So a part is empty only where one sample of it would take as long as
/// the largest part, or longer.
std::vector<int64_t> part_sizes(int64_t n, int parts, const std::vector<double>& capacities = {});

/// The tensor itself when it starts on 64 bytes, else a copy that does: MKL's sums depend on where a tensor starts.
at::Tensor aligned(const at::Tensor& tensor);

/// On `device`: a copy that is ordered by the current stream. For the CPU aligned(tensor), wherever that is.
at::Tensor placed_tensor(const at::Tensor& tensor, c10::Device device);

/// Rows start, start + step, ... before `stop`, aligned; a 0-dim or undefined tensor as it is.
at::Tensor take_rows(const at::Tensor& tensor, int64_t start, int64_t stop, int64_t step);

/// What is wrong with dividing `tensor` in a batch of `rows` samples: empty for one of `rows` rows or of dimension 0.
std::string row_problem(const at::Tensor& tensor, int64_t rows, const std::string& path);

/// How batches of type B are divided. `first_rows` is the number of samples by the first leaf that tells, else -1;
/// `is_time_first` tells whether a tensor has `samples` along dimension 1.
template <class B>
struct Batch {
  static constexpr bool kDivisible = false;
};

template <>
struct Batch<at::Tensor> {
  static constexpr bool kDivisible = true;
  static int64_t first_rows(const at::Tensor& b) { return b.defined() && b.dim() > 0 ? b.size(0) : -1; }
  static bool is_time_first(const at::Tensor& b, int64_t samples) {
    return b.defined() && b.dim() > 1 && b.size(1) == samples;
  }
  static std::string problem(const at::Tensor& b, int64_t rows, const std::string& path) {
    return row_problem(b, rows, path);
  }
  static at::Tensor place(const at::Tensor& b, c10::Device device) { return placed_tensor(b, device); }
  static at::Tensor take(const at::Tensor& b, int64_t start, int64_t stop, int64_t step) {
    return take_rows(b, start, stop, step);
  }
};

template <class Item>
struct Batch<std::vector<Item>> {
  static constexpr bool kDivisible = true;
  static int64_t first_rows(const std::vector<Item>& b) { return static_cast<int64_t>(b.size()); }
  static bool is_time_first(const std::vector<Item>&, int64_t) { return false; }
  static std::string problem(const std::vector<Item>& b, int64_t rows, const std::string& path) {
    if (first_rows(b) == rows) return {};
    return path + ": " + std::to_string(b.size()) + " items in a batch of " + std::to_string(rows) + " samples";
  }
  static std::vector<Item> place(const std::vector<Item>& b, c10::Device device) {
    return take(b, 0, first_rows(b), 1, device);
  }
  static std::vector<Item> take(const std::vector<Item>& b, int64_t start, int64_t stop, int64_t step,
                                c10::Device device = c10::kCPU) {
    std::vector<Item> taken;
    for (int64_t i = start; i < stop; i += step) {
      const auto& item = b[static_cast<size_t>(i)];
      if constexpr (Batch<Item>::kDivisible) {
        taken.push_back(Batch<Item>::place(item, device));
      } else {
        taken.push_back(item);
      }
    }
    return taken;
  }
};

template <class Data, class Target>
  requires(Batch<Data>::kDivisible && (std::is_void_v<Target> || Batch<Target>::kDivisible))
struct Batch<torch::data::Example<Data, Target>> {
  using Example = torch::data::Example<Data, Target>;
  static constexpr bool kDivisible = true;
  static int64_t first_rows(const Example& b) {
    const int64_t rows = Batch<Data>::first_rows(b.data);
    if constexpr (std::is_void_v<Target>) {
      return rows;
    } else {
      return rows >= 0 ? rows : Batch<Target>::first_rows(b.target);
    }
  }
  static bool is_time_first(const Example& b, int64_t samples) {
    if constexpr (std::is_void_v<Target>) {
      return Batch<Data>::is_time_first(b.data, samples);
    } else {
      return Batch<Data>::is_time_first(b.data, samples) || Batch<Target>::is_time_first(b.target, samples);
    }
  }
  static std::string problem(const Example& b, int64_t rows, const std::string& path) {
    auto found = Batch<Data>::problem(b.data, rows, path + ".data");
    if constexpr (!std::is_void_v<Target>) {
      if (found.empty()) found = Batch<Target>::problem(b.target, rows, path + ".target");
    }
    return found;
  }
  static Example place(const Example& b, c10::Device device) {
    if constexpr (std::is_void_v<Target>) {
      return Example(Batch<Data>::place(b.data, device));
    } else {
      return Example(Batch<Data>::place(b.data, device), Batch<Target>::place(b.target, device));
    }
  }
  static Example take(const Example& b, int64_t start, int64_t stop, int64_t step) {
    if constexpr (std::is_void_v<Target>) {
      return Example(Batch<Data>::take(b.data, start, stop, step));
    } else {
      return Example(Batch<Data>::take(b.data, start, stop, step), Batch<Target>::take(b.target, start, stop, step));
    }
  }
};

/// Samples of a part: size(0) of its first tensor, the length of a vector; -1 where nothing tells or its leaves differ.
template <class B>
int64_t rows_of(const B& batch) {
  if constexpr (Batch<B>::kDivisible) {
    const int64_t rows = Batch<B>::first_rows(batch);
    return Batch<B>::problem(batch, rows, {}).empty() ? rows : -1;
  } else {
    return -1;
  }
}

/// Samples of a part, by its own leaves, where these agree on fewer than the `samples` that its data set was asked for:
/// it has left some out, maybe. `samples` else, and where a tensor has them along dimension 1 (time first).
template <class B>
int64_t samples_left(const B& part, int64_t samples) {
  const int64_t rows = rows_of(part);
  if constexpr (Batch<B>::kDivisible) {
    return rows >= 0 && rows < samples && !Batch<B>::is_time_first(part, samples) ? rows : samples;
  } else {
    return samples;
  }
}

/// The same batch with every tensor as placed_tensor; batches of other types are left alone.
template <class B>
B placed(const B& batch, c10::Device device = c10::kCPU) {
  if constexpr (Batch<B>::kDivisible) {
    return Batch<B>::place(batch, device);
  } else {
    return batch;
  }
}

/// The contiguous parts of a batch, of the sizes of part_sizes. Throws InvalidArgument for one that cannot be divided,
/// naming the leaf.
template <class B>
std::vector<B> split(const B& batch, int parts, const std::vector<double>& capacities = {}) {
  if (parts == 1) return {placed(batch)};
  constexpr const char* kRemedy = "; pass PerReplica with one part for each local replica";
  if constexpr (Batch<B>::kDivisible) {
    const int64_t rows = Batch<B>::first_rows(batch);
    if (rows < 0) throw InvalidArgument(std::string("the batch has no tensor that tells its rows") + kRemedy);
    const auto problem = Batch<B>::problem(batch, rows, "the batch");
    if (!problem.empty()) throw InvalidArgument(problem + kRemedy);
    std::vector<B> divided;
    int64_t start = 0;
    for (int64_t size : part_sizes(rows, parts, capacities)) {
      divided.push_back(Batch<B>::take(batch, start, start + size, 1));
      start += size;
    }
    return divided;
  } else {
    throw InvalidArgument(
        std::string("a batch of this type cannot be divided; make it a Tensor, a torch::data::Example "
                    "or a std::vector of samples") +
        kRemedy);
  }
}

}  // namespace muster::detail
