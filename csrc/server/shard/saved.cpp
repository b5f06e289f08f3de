#include "server/shard/saved.h"

#include <ATen/ops/empty.h>

#include <cstring>

#include "muster/error.h"

namespace muster::server {

namespace {

constexpr const char* kName = "server";

}  // namespace

checkpoint::NamedTensors tensor_of(const Saved& saved) {
  const std::string text = encode(saved);
  const auto bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return {{kName, bytes}};
}

Saved saved_in(const checkpoint::NamedTensors& tensors) {
  const auto found = tensors.find(kName);
  if (found == tensors.end() || found->second.scalar_type() != at::kByte) {
    throw CheckpointError("it lacks what a parameter server says in it; use an older snapshot");
  }
  auto saved = decode<Saved>({static_cast<const char*>(found->second.const_data_ptr()), found->second.nbytes()});
  saved.configured.plan.validate();
  return saved;
}

}  // namespace muster::server
