#include "comm/nccl/arena.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "core/log.h"
#include "muster/error.h"

namespace muster::comm::nccl {
namespace {

constexpr size_t kSliceAlignment = 512;

size_t align(size_t bytes) { return (bytes + kSliceAlignment - 1) / kSliceAlignment * kSliceAlignment; }

}  // namespace

struct Arena::Piece {
  Piece(std::shared_ptr<Clique> the_clique, int its_local, size_t its_bytes)
      : clique(std::move(the_clique)), local(its_local), bytes(its_bytes) {
    const DeviceScope scope(clique->device(), clique->options().devices[static_cast<size_t>(local)]);
    Status status = clique->nccl().allocate(&data, bytes);
    if (status != kSuccess) {
      clique->device().release_cached();
      status = clique->nccl().allocate(&data, bytes);
    }
    if (status != kSuccess) {
      throw CommError("NCCL could not allocate " + std::to_string(bytes) + " bytes at rank " +
                      std::to_string(clique->options().first_rank + local) + ": " +
                      clique->nccl().describe(status, nullptr) + ". Free memory of the device, or use smaller buckets");
    }
  }

  ~Piece() {
    const NcclApi nccl = clique->nccl();
    const DeviceApi device = clique->device();
    try {
      const DeviceScope scope(device, clique->options().devices[static_cast<size_t>(local)]);
      device.synchronize();  // kernels of any stream may still be at work on it
      if (window != nullptr) {
        clique->call_unless_failed(local, [&](int, Comm comm) { return nccl.deregister_window(comm, window); });
      }
      clique.reset();  // destroys the communicator, where this is the last that needs it
      nccl.free(data);
    } catch (const std::exception& error) {
      log(LogLevel::warning, std::string("memory of NCCL was not given back: ") + error.what());
    }
  }

  Piece(const Piece&) = delete;
  Piece& operator=(const Piece&) = delete;

  std::shared_ptr<Clique> clique;
  const int local;
  const size_t bytes;
  void* data = nullptr;
  Window window = nullptr;  // null too where NCCL sees no use for one
};

void Arena::make_piece(size_t bytes, Milliseconds timeout) {
  piece_.reset();
  used_ = 0;
  auto piece = std::make_shared<Piece>(launcher_->shared_clique(), local_, std::max(bytes, align(piece_bytes_)));
  const NcclApi& nccl = launcher_->clique().nccl();
  if (nccl.register_window) {
    LaunchPart part;
    part.request.numel = static_cast<int64_t>(piece->bytes);
    part.encode = [&nccl, piece](Comm comm, Stream) {
      return nccl.register_window(comm, piece->data, piece->bytes, &piece->window);
    };
    const LaunchPtr launch = launcher_->post(local_, std::move(part));
    launcher_->await_launched(local_, *launch, timeout);
  }
  piece_ = std::move(piece);
}

at::Tensor Arena::allocate(int64_t numel, at::ScalarType dtype, Milliseconds timeout) {
  launcher_->clique().check();
  const auto options = at::TensorOptions().dtype(dtype).device(device_);
  if (numel == 0) return at::zeros({0}, options);
  const size_t bytes = align(static_cast<size_t>(numel) * c10::elementSize(dtype));
  if (!piece_ || used_ + bytes > piece_->bytes) make_piece(bytes, timeout);
  void* const data = static_cast<std::byte*>(piece_->data) + used_;
  used_ += bytes;
  return at::from_blob(data, {numel}, [piece = piece_](void*) mutable { piece.reset(); }, options).zero_();
}

}  // namespace muster::comm::nccl
