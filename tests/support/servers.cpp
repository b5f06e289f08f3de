#include "support/servers.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "device/kernel_dtype.h"
#include "net/unix_socket.h"
#include "optimizer/flat_optimizer.h"
#include "optimizer/gradient_norm.h"

namespace muster::testing {

using namespace server;

namespace {

constexpr size_t kTile = kernels::kTile;

ParameterSpec spec(const std::string& name, std::vector<int64_t> sizes, at::ScalarType dtype = at::kFloat) {
  ParameterSpec spec{name, std::move(sizes), {}, dtype};
  int64_t stride = 1;
  spec.strides.resize(spec.sizes.size());
  for (size_t d = spec.sizes.size(); d-- > 0;) {
    spec.strides[d] = stride;
    stride *= std::max<int64_t>(spec.sizes[d], 1);
  }
  return spec;
}

int64_t numel_of(const ParameterSpec& spec) {
  int64_t numel = 1;
  for (const int64_t size : spec.sizes) numel *= size;
  return numel;
}

std::byte* at_element(const at::Tensor& tensor, int64_t element) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr()) + element * static_cast<int64_t>(tensor.element_size());
}

kernels::StepScalars plain_scalars() {
  return {.divisor = 1, .clip = 1, .norm = 0, .unit = 1, .finite = 1, .dropped = 0};
}

kernels::WindowOptions window_options(double clip_norm) {
  kernels::WindowOptions options{};
  options.clip_norm = clip_norm;
  options.loss_scale = 1;
  return options;
}

}  // namespace

Plan small_plan(uint32_t servers, uint32_t workers, const FlatGroups& groups) {
  Plan plan;
  plan.parameters = {spec("embed", {37, 11}), spec("hidden", {5, static_cast<int64_t>(3 * kTile) + 100}),
                     spec("scale", {}),       spec("low", {static_cast<int64_t>(kTile) + 3}, at::kBFloat16),

                     spec("none", {0, 4}),    spec("wide", {2 * static_cast<int64_t>(kTile)}, at::kDouble),
                     spec("bias", {129}),     spec("lower", {77}, at::kBFloat16)};
  plan.group_of.resize(plan.parameters.size());
  plan.group_of[2] = 1;
  plan.groups = groups;
  plan.servers = servers;
  plan.workers = workers;
  plan.chunk_bytes = kMinChunkBytes;
  plan.timeout_ms = 60'000;
  return plan;
}

std::vector<std::string> server_names(uint32_t servers) {
  std::vector<std::string> names;
  for (uint32_t s = 0; s < servers; ++s) names.push_back("muster-test-" + net::random_name());
  return names;
}

ClientConfig config_of(const std::vector<std::string>& names, uint32_t rank, const Plan& plan, bool shares_memory) {
  ClientConfig config;
  config.servers = names;
  config.rank = rank;
  config.plan = plan;
  config.shares_memory = shares_memory;
  config.log_bytes = 0;
  return config;
}

PushedRows pushed_rows(const TableSpec& table, uint64_t step) {
  PushedRows pushed;
  const int64_t end = table.num_rows - 80 + static_cast<int64_t>(step);
  const auto stride = static_cast<int64_t>(step == 1 ? 1 : 37 + step);
  for (int64_t row = 0; row < end; row += stride) pushed.rows.push_back(row);
  if (pushed.rows.back() < end - 1) pushed.rows.push_back(end - 1);
  pushed.gradients.resize(pushed.rows.size() * static_cast<size_t>(table.dim));
  for (size_t i = 0; i < pushed.gradients.size(); ++i) pushed.gradients[i] = std::sin(static_cast<float>(i + step));
  return pushed;
}

at::Tensor initial_values(const Plan& plan, size_t p) {
  const auto& spec = plan.parameters[p];
  return at::sin(at::arange(numel_of(spec), at::kDouble) * 0.7 + static_cast<double>(p)).to(spec.dtype);
}

at::Tensor gradient_of(const Plan& plan, size_t p, uint32_t rank, uint64_t step) {
  const auto& spec = plan.parameters[p];
  const double phase = static_cast<double>(p) * 3 + static_cast<double>(rank) * 1.7 + static_cast<double>(step) * 0.3;
  return (at::sin(at::arange(numel_of(spec), at::kDouble) * 1.3 + phase) * weight_of(rank))
      .to(accumulation_dtype(spec.dtype));
}

at::Tensor sum_of(const Plan& plan, size_t p, uint32_t workers, uint64_t step) {
  std::vector<at::Tensor> gradients;
  std::vector<const void*> sources;
  for (uint32_t r = 0; r < workers; ++r) {
    gradients.push_back(gradient_of(plan, p, r, step));
    sources.push_back(gradients.back().const_data_ptr());
  }
  const auto sum = at::empty_like(gradients.front());
  void* destination = sum.mutable_data_ptr();
  kernels::tree_reduce(kernel_dtype(sum.scalar_type()), kernels::Reduction::sum, sources.data(),
                       static_cast<int>(workers), &destination, 1, static_cast<size_t>(sum.numel()));
  return sum;
}

double weight_of(uint32_t rank) { return 3.0 + rank; }

Worker::Worker(ClientConfig config) : plan(config.plan), rank(config.rank), client(std::move(config)) {
  for (uint32_t c = 0; c < client.chunks().size(); ++c) {
    landing_.push_back(client.allocate(client.part_bytes(c, Part::parameter)));
  }
}

void Worker::write() {
  for (uint32_t c = 0; c < client.chunks().size(); ++c) {
    const auto& chunk = client.chunks()[c];
    const auto values = at::zeros({chunk.numel}, chunk.dtype);
    for (const auto& piece : chunk.pieces) {
      const auto initial = initial_values(plan, static_cast<size_t>(piece.parameter));
      values.narrow(0, piece.offset, piece.run.count).copy_(initial.narrow(0, piece.run.begin, piece.run.count));
    }
    client.write(c, Part::parameter, {at_element(values, 0), values.nbytes()});
  }
}

uint64_t Worker::join() {
  if (rank == 0 && !client.is_started()) client.start([this] { write(); });
  return client.join();
}

void Worker::push(uint64_t step) {
  push_chunks(step);
  for (uint32_t t = 0; t < plan.tables.size(); ++t) {
    std::vector<int64_t> rows(static_cast<size_t>(num_rows));
    std::iota(rows.begin(), rows.end(), 0);
    const std::vector<float> gradients(rows.size() * static_cast<size_t>(plan.tables[t].dim), 1);
    client.rows().push(step, t, rows, gradients);
  }
}

void Worker::push_chunks(uint64_t step) {
  pushed_ = std::make_shared<std::vector<at::Tensor>>();
  auto& gradients = *pushed_;
  for (size_t p = 0; p < plan.parameters.size(); ++p) gradients.push_back(gradient_of(plan, p, rank, step + shift));
  if (skipped_parameter < gradients.size()) gradients[skipped_parameter].zero_();
  static constexpr std::byte kGap[64]{};
  for (uint32_t c = 0; c < client.chunks().size(); ++c) {
    const auto& chunk = client.chunks()[c];
    const auto size = static_cast<int64_t>(c10::elementSize(chunk.gradient));
    std::vector<Bytes> pieces;
    int64_t end = 0;
    for (const auto& piece : chunk.pieces) {
      if (piece.offset > end) pieces.emplace_back(kGap, static_cast<size_t>((piece.offset - end) * size));
      pieces.emplace_back(at_element(gradients[static_cast<size_t>(piece.parameter)], piece.run.begin),
                          static_cast<size_t>(piece.run.count * size));
      end = piece.offset + piece.run.count;
    }
    if (chunk.numel > end) pieces.emplace_back(kGap, static_cast<size_t>((chunk.numel - end) * size));
    client.push(step, c, pieces, step % 3 == 0 ? nullptr : pushed_);
  }
}

void Worker::step(uint64_t step, double clip_norm, const FlatGroups* groups) {
  push(step);
  client.flush();
  decision = client.commit(step, {weight_of(rank), 0, 1, 0, 0, 0, 1, 0});
  spoil_pushed();
  Apply command;
  command.step = step;
  command.members = decision.members;
  command.groups = groups == nullptr ? plan.groups : *groups;
  if (skipped_parameter < plan.parameters.size()) command.unused = {skipped_parameter};
  command.scalars = plain_scalars();
  finish_norm(client.sum(step, decision.members), decision.numbers.data(), window_options(clip_norm), command.scalars);
  norm = command.scalars.norm;
  if (step % 2 == 0) {
    client.apply(command);
  } else {
    client.apply_and_read(command, landing_);
  }
}

void Worker::step_alone(uint64_t step) {
  push(step);
  client.flush();
  Apply command;
  command.step = step;
  command.members = {rank};
  command.groups = plan.groups;
  client.apply(command);
  spoil_pushed();
  decision = client.commit(step, {});
}

// Whose memory is the worker's own again.
void Worker::spoil_pushed() {
  for (const auto& gradient : *pushed_) gradient.fill_(-7);
}

std::vector<at::Tensor> Worker::parameters(uint64_t at_least) {
  client.read(Part::parameter, at_least, landing_);
  std::vector<at::Tensor> values;
  for (const auto& spec : plan.parameters) values.push_back(at::empty({numel_of(spec)}, spec.dtype));
  for (uint32_t c = 0; c < client.chunks().size(); ++c) {
    const auto& chunk = client.chunks()[c];
    const auto size = static_cast<int64_t>(c10::elementSize(chunk.dtype));
    for (const auto& piece : chunk.pieces) {
      std::memcpy(at_element(values[static_cast<size_t>(piece.parameter)], piece.run.begin),
                  landing_[c] + piece.offset * size, static_cast<size_t>(piece.run.count * size));
    }
  }
  return values;
}

std::vector<at::Tensor> reference(const Plan& plan, uint32_t workers, uint64_t steps, double clip_norm,
                                  uint32_t skipped_parameter, double* norm) {
  std::vector<FlatParameter> parameters;
  for (size_t p = 0; p < plan.parameters.size(); ++p) {
    parameters.push_back({plan.parameters[p].name, initial_values(plan, p), plan.group_of[p]});
  }
  FlatOptimizer optimizer(parameters, plan.groups);
  for (uint64_t step = 1; step <= steps; ++step) {
    std::vector<FlatGradient> sums(parameters.size());
    std::vector<at::Tensor> used;
    for (size_t p = 0; p < parameters.size(); ++p) {
      if (p == skipped_parameter) continue;
      sums[p].dense = sum_of(plan, p, workers, step);
      used.push_back(sums[p].dense);
    }
    double tail[kernels::kTailFields] = {0, 0, static_cast<double>(workers), 0, 0, 0, static_cast<double>(workers), 0};
    for (uint32_t r = 0; r < workers; ++r) tail[kernels::kWeight] += weight_of(r);
    auto scalars = plain_scalars();
    take_norm(used, tail, window_options(clip_norm), scalars);
    if (norm != nullptr) *norm = scalars.norm;
    optimizer.step(std::move(sums), plan.groups, &scalars, /*keep=*/false);
  }
  std::vector<at::Tensor> values;
  for (const auto& parameter : parameters) values.push_back(parameter.tensor);
  return values;
}

bool bit_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].scalar_type() != b[i].scalar_type() || a[i].nbytes() != b[i].nbytes()) return false;
    if (std::memcmp(a[i].const_data_ptr(), b[i].const_data_ptr(), a[i].nbytes()) != 0) return false;
  }
  return true;
}

}  // namespace muster::testing
