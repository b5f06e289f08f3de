#include "strategy/backward_by_hand.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <limits>
#include <unordered_map>
#include <utility>

#include "comm/peer_memory.h"
#include "core/plain_memory.h"
#include "device/kernel_dtype.h"
#include "kernels/kernels.h"
#include "muster/error.h"
#include "strategy/sigterm.h"

namespace muster {

namespace {

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble};
constexpr int64_t kSmall = 32'768;  // elements: torch copies more than that in several threads
constexpr int64_t kUnderWay = 4;    // pieces
constexpr int64_t kAlignment = 64;  // of a piece's place, in elements

// The dtype of a gradient on its way, real and imaginary parts apart.
at::ScalarType travels_in(const at::Tensor& parameter) {
  return accumulation_dtype(c10::toRealValueType(parameter.scalar_type()));
}

std::vector<int64_t> real_sizes(const at::Tensor& parameter) {
  auto sizes = parameter.sizes().vec();
  if (parameter.is_complex()) sizes.push_back(2);
  return sizes;
}

int64_t real_numel(const at::Tensor& parameter) { return parameter.numel() * (parameter.is_complex() ? 2 : 1); }

/// What of a parameter's gradient travels in a piece: all of it, or, of one that is larger than a piece, a run of it.
struct GradientRun {
  size_t parameter;
  int64_t first;
  int64_t count;
  int64_t offset;  // in the piece

  bool is_whole(const at::Tensor& of) const { return count == real_numel(of); }
  bool is_last(const at::Tensor& of) const { return first + count == real_numel(of); }
};

using GradientPiece = std::vector<GradientRun>;

int64_t size_of(const GradientPiece& piece) { return piece.back().offset + piece.back().count; }

// The gradients of parameters that travel in `dtype`, in pieces of `most` elements.
std::vector<GradientPiece> in_pieces(const std::vector<at::Tensor>& parameters, at::ScalarType dtype, int64_t most) {
  std::vector<GradientPiece> pieces;
  int64_t room = 0;
  for (size_t p = 0; p < parameters.size(); ++p) {
    const int64_t numel = real_numel(parameters[p]);
    if (travels_in(parameters[p]) != dtype || numel == 0) continue;
    for (int64_t first = 0; first < numel; first += most) {
      const int64_t count = std::min(most, numel - first);
      if (count > room) {
        pieces.emplace_back();
        room = most;
      }
      pieces.back().push_back({p, first, count, most - room});
      room -= count;
    }
  }
  return pieces;
}

// How many elements travel at once: as many as a core's cache has room for, where ranks see one another's memory.
int64_t elements_at_once(const comm::Communicator& group, at::ScalarType dtype) {
  if (!group.device().is_cpu()) return std::numeric_limits<int64_t>::max();
  const int64_t bytes = int64_t{1} << (group.peer_memory() != nullptr ? 19 : 23);
  return bytes / static_cast<int64_t>(c10::elementSize(dtype));
}

/// A gradient that travels in several runs: its real numbers one after another, and where their means go.
struct LongGradient {
  at::Tensor from;  // undefined: zeros
  at::Tensor to;
  bool is_in_place = false;  // `to` is the gradient's memory

  LongGradient(const at::Tensor& parameter, const at::Tensor& gradient, const at::TensorOptions& options) {
    if (gradient.defined()) from = as_real(in_plain_memory(gradient.to_dense())).contiguous().view({-1});
    is_in_place = gradient.defined() && gradient.layout() == at::kStrided && !is_lazy(gradient) &&
                  gradient.is_contiguous() && from.dtype() == options.dtype() && from.device() == options.device();
    to = is_in_place ? from : at::empty({real_numel(parameter)}, options);
  }
};

// Whether a kernel may copy it from or to `sums`; a call into torch costs more than the work on a small one.
bool is_small_and_plain(const at::Tensor& gradient, const at::Tensor& sums) {
  return gradient.layout() == at::kStrided && gradient.is_cpu() && sums.is_cpu() && gradient.numel() < kSmall &&
         !gradient.is_complex() && accumulation_dtype(gradient.scalar_type()) == sums.scalar_type() &&
         !is_lazy(gradient) && gradient.is_contiguous();
}

template <class T>
void divide(const void* sums, void* means, int64_t n, T divisor) {
  for (int64_t i = 0; i < n; ++i) static_cast<T*>(means)[i] = static_cast<const T*>(sums)[i] / divisor;
}

/// Gradients and the places of their sums: kernels copy what is small and plain, torch the rest at once.
class Copies {
 public:
  void add(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& sums, int64_t offset) {
    const int64_t n = real_numel(parameter);
    const bool is_small = !gradient.defined() || is_small_and_plain(gradient, sums);
    if (!is_small || !sums.is_cpu()) {
      const auto to = sums.narrow(0, offset, n);
      if (!gradient.defined()) {
        to.zero_();
        return;
      }
      to_.push_back(to.view(real_sizes(parameter)));
      from_.push_back(as_real(gradient.to_dense()));
      return;
    }
    const void* const source = gradient.defined() ? gradient.const_data_ptr() : nullptr;
    const auto dtype = gradient.defined() ? gradient.scalar_type() : sums.scalar_type();
    small_.push_back({source, kernel_dtype(dtype),
                      static_cast<std::byte*>(sums.mutable_data_ptr()) + offset * sums.itemsize(),
                      static_cast<size_t>(n)});
  }

  // A run of a gradient; undefined: zeros.
  void add_run(const at::Tensor& from, const at::Tensor& to) {
    if (!from.defined()) {
      to.zero_();
      return;
    }
    to_.push_back(to);
    from_.push_back(from);
  }

  void run() const {
    kernels::pack(small_.data(), small_.size(), /*accumulate=*/false);
    if (!to_.empty()) at::_foreach_copy_(to_, from_);
  }

 private:
  std::vector<kernels::PackItem> small_;
  std::vector<at::Tensor> to_, from_;
};

// Whether a worker has a gradient of each.
at::Tensor presence(const std::vector<at::Tensor>& parameters, bool has_gradients) {
  auto present = at::zeros({static_cast<int64_t>(parameters.size())}, at::kDouble);
  if (!has_gradients) return present;
  for (size_t p = 0; p < parameters.size(); ++p) present.data_ptr<double>()[p] = parameters[p].grad().defined() ? 1 : 0;
  return present;
}

/// The way back, divided.
class Means {
 public:
  Means(const at::Tensor& sums, int64_t divisor) : sums_(sums), divisor_(divisor) {
    if (!sums_.is_cpu()) sums_.div_(divisor_);  // one kernel for all
  }

  void add(const at::Tensor& parameter, int64_t offset) {
    auto& gradient = parameter.mutable_grad();
    const int64_t n = real_numel(parameter);
    const bool is_strided = gradient.defined() && gradient.layout() == at::kStrided;
    if (is_strided && gradient.scalar_type() == sums_.scalar_type() && is_small_and_plain(gradient, sums_)) {
      divide_small(gradient, offset, n);
      return;
    }
    const auto sum = sums_.narrow(0, offset, n).view(real_sizes(parameter));
    if (is_strided && sums_.is_cpu() && !is_lazy(gradient) && gradient.scalar_type() == sum.scalar_type()) {
      at::div_out(gradient, sum, at::Scalar(divisor_));
      return;
    }
    hand_over(sums_.is_cpu() ? at::div(sum, at::Scalar(divisor_)) : sum, parameter);
  }

  // A run of a gradient.
  void add_run(const at::Tensor& to, int64_t offset) {
    const auto sum = sums_.narrow(0, offset, to.numel());
    if (sums_.is_cpu()) {
      auto mean = to;
      at::div_out(mean, sum, at::Scalar(divisor_));
    } else {
      to_.push_back(to);
      from_.push_back(sum);
    }
  }

  void run() {
    if (!to_.empty()) at::_foreach_copy_(to_, from_);
    to_.clear();
    from_.clear();
  }

  // `mean`, of the parameter's real numbers, becomes its gradient. After run(), where add_run() made it.
  void hand_over(at::Tensor mean, const at::Tensor& parameter) {
    auto& gradient = parameter.mutable_grad();
    if (parameter.is_complex()) mean = at::view_as_complex(mean);
    if (gradient.defined() && gradient.layout() == at::kStrided) {
      to_.push_back(gradient);
      from_.push_back(mean);
    } else {
      gradient = mean.to(parameter.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    }
  }

 private:
  void divide_small(const at::Tensor& gradient, int64_t offset, int64_t n) const {
    const auto* const from = static_cast<const std::byte*>(sums_.const_data_ptr()) + offset * sums_.itemsize();
    if (sums_.scalar_type() == at::kDouble) {
      divide(from, gradient.mutable_data_ptr(), n, static_cast<double>(divisor_));
    } else {
      divide(from, gradient.mutable_data_ptr(), n, static_cast<float>(divisor_));
    }
    gradient.unsafeGetTensorImpl()->bump_version();
  }

  const at::Tensor& sums_;
  const int64_t divisor_;
  std::vector<at::Tensor> to_, from_;
};

using LongGradients = std::unordered_map<size_t, LongGradient>;  // by parameter

void fill(const GradientPiece& piece, const at::Tensor& sums, const std::vector<at::Tensor>& parameters,
          bool has_gradients, LongGradients& long_gradients) {
  Copies copies;
  for (const auto& run : piece) {
    const auto& parameter = parameters[run.parameter];
    const auto gradient = has_gradients ? parameter.grad() : at::Tensor();
    if (run.is_whole(parameter)) {
      copies.add(parameter, gradient, sums, run.offset);
      continue;
    }
    if (!has_gradients) {
      copies.add_run({}, sums.narrow(0, run.offset, run.count));
      continue;
    }
    const auto& whole = long_gradients.try_emplace(run.parameter, parameter, gradient, sums.options()).first->second;
    copies.add_run(whole.from.defined() ? whole.from.narrow(0, run.first, run.count) : whole.from,
                   sums.narrow(0, run.offset, run.count));
  }
  copies.run();
}

void take_means(const GradientPiece& piece, const at::Tensor& sums, int64_t divisor,
                const std::vector<at::Tensor>& parameters, const at::Tensor& present, LongGradients& long_gradients) {
  Means means(sums, divisor);
  std::vector<size_t> complete;
  for (const auto& run : piece) {
    const auto& parameter = parameters[run.parameter];
    if (present.const_data_ptr<double>()[run.parameter] == 0) continue;
    if (run.is_whole(parameter)) {
      means.add(parameter, run.offset);
      continue;
    }
    means.add_run(long_gradients.at(run.parameter).to.narrow(0, run.first, run.count), run.offset);
    if (run.is_last(parameter)) complete.push_back(run.parameter);
  }
  means.run();
  for (const size_t p : complete) {
    const auto& whole = long_gradients.at(p);
    if (!whole.is_in_place) means.hand_over(whole.to.view(real_sizes(parameters[p])), parameters[p]);
  }
  means.run();
  for (const size_t p : complete) long_gradients.erase(p);
}

}  // namespace

void GradientAverage::check() const {
  const auto& options = session_.options();
  if (session_.groups().servers) {
    throw InvalidArgument(
        "backward() by hand does not reach parameter servers; return the loss from strategy.step(fn, ...)");
  }
  if (options.precision == Precision::fp16 || options.loss_scale) {
    throw InvalidArgument(
        "backward() by hand does not know the loss scale; return the loss from strategy.step(fn, ...)");
  }
  if (session_.topology().local_replicas() > 1) {
    throw InvalidArgument(
        "backward by hand needs one replica per process; write the step as a function that returns the "
        "loss and call strategy.step(fn, ...)");
  }
}

at::Tensor GradientAverage::buffer(int64_t numel, at::ScalarType dtype) {
  auto& memory = buffers_[dtype == at::kDouble ? 1 : 0];
  if (!memory.defined() || memory.numel() < numel) {
    memory.reset();  // before there is another
    memory = session_.groups().gradients[0]->allocate(numel, dtype);
  }
  return memory.narrow(0, 0, numel);
}

void GradientAverage::reduce(const std::vector<at::Tensor>& parameters, bool has_gradients) {
  const auto pass = session_.enter();
  check();
  SigtermWatch::note_step();
  const auto& groups = session_.groups();
  const int64_t workers = session_.topology().num_workers;
  if (workers == 1) return;
  const at::NoGradGuard no_grad;
  const auto present = presence(parameters, has_gradients);
  auto present_anywhere = groups.control_of(0)->all_reduce(present, ReduceOp::sum);
  for (const auto dtype : kDtypes) {
    const auto pieces = in_pieces(parameters, dtype, elements_at_once(*groups.gradients[0], dtype));
    if (pieces.empty()) continue;
    int64_t most = 0;
    for (const auto& piece : pieces) most = std::max(most, (size_of(piece) + kAlignment - 1) / kAlignment * kAlignment);
    const auto places = std::min(kUnderWay, static_cast<int64_t>(pieces.size()));
    const auto sums = buffer(places * most, dtype);
    const auto place_of = [&](size_t piece) {
      return sums.narrow(0, static_cast<int64_t>(piece) % places * most, size_of(pieces[piece]));
    };
    LongGradients long_gradients;  // under way
    std::deque<comm::Work> under_way;
    size_t taken = 0;
    const auto take = [&] {
      under_way.front().wait();
      under_way.pop_front();
      present_anywhere.wait();
      if (has_gradients) take_means(pieces[taken], place_of(taken), workers, parameters, present, long_gradients);
      ++taken;
    };
    for (size_t piece = 0; piece < pieces.size(); ++piece) {
      if (static_cast<int64_t>(under_way.size()) == places) take();
      fill(pieces[piece], place_of(piece), parameters, has_gradients, long_gradients);
      under_way.push_back(groups.gradients[0]->all_reduce(place_of(piece), ReduceOp::sum));
    }
    while (!under_way.empty()) take();
  }
  present_anywhere.wait();  // where there was nothing to send, too
}

void GradientAverage::average(const std::vector<at::Tensor>& parameters) { reduce(parameters, true); }

void GradientAverage::add_nothing(const std::vector<at::Tensor>& parameters) { reduce(parameters, false); }

void GradientAverage::release() noexcept {
  for (auto& memory : buffers_) memory.reset();
}

void GradientAverage::average_module(int module) {
  std::vector<at::Tensor> parameters;
  for (int p : session_.registry().parameters_of(module)) {
    const auto& parameter = session_.registry().parameter(0, static_cast<size_t>(p));
    if (parameter.requires_grad()) parameters.push_back(parameter);
  }
  average(parameters);
}

}  // namespace muster
