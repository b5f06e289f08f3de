// cuda_kernels.h of a build without CUDA: callers turn not_built into NotBuilt.
#include "kernels/cuda/cuda_kernels.h"

namespace muster::kernels::cuda {
namespace {

constexpr Status kNotBuilt{Status::Code::not_built, "this build of muster has no CUDA; build it with MUSTER_CUDA=ON"};

}  // namespace

bool is_built() noexcept { return false; }

Status check_code(int&) noexcept { return kNotBuilt; }

bool is_capturing(Stream) noexcept { return false; }

Status pack(const PackPlan&, const void* const*, void*, bool, double, const double*, Stream) noexcept {
  return kNotBuilt;
}

Status tree_sum(DType, const void* const*, int, void* const*, int, size_t, Stream) noexcept { return kNotBuilt; }

Status grad_stats(const StatsSegment*, const Chunk*, uint32_t, double, Stream) noexcept { return kNotBuilt; }

Status finish_window(const double*, size_t, NormSum*, const double*, const double*, float*, size_t,
                     const WindowOptions&, StepScalars*, LossScaleState*, WindowReport*, uint32_t, Stream) noexcept {
  return kNotBuilt;
}

Status count_steps(float*, const double*, size_t, const StepScalars*, Stream) noexcept { return kNotBuilt; }

Status apply_means(const MeanSegment*, const Chunk*, uint32_t, const StepScalars*, bool, Stream) noexcept {
  return kNotBuilt;
}

Status gather_buffers(const BufferPlan&, const BufferSums&, const double*, double, int, int, Stream) noexcept {
  return kNotBuilt;
}

Status scatter_buffers(const BufferPlan&, const BufferSums&, const double*, bool, int, Stream) noexcept {
  return kNotBuilt;
}

Status note_loss(const LossTerms&, const StepScalars*, const LossScaleState*, double*, double*, void*, WindowReport*,
                 Stream) noexcept {
  return kNotBuilt;
}

Status adam_step(const StepPlan&, const AdamGroup*, Stream) noexcept { return kNotBuilt; }
Status sgd_step(const StepPlan&, const SgdGroup*, Stream) noexcept { return kNotBuilt; }
Status adagrad_step(const StepPlan&, const AdagradGroup*, Stream) noexcept { return kNotBuilt; }

Status digest_copies(const CopySegment*, const Chunk*, uint32_t, Stream) noexcept { return kNotBuilt; }
Status mend_copies(const CopySegment*, const Chunk*, uint32_t, Stream) noexcept { return kNotBuilt; }

Status peer_reduce(const Peers&, DType, void* const*, size_t, Stream) noexcept { return kNotBuilt; }
Status reduce_adam_step(const Peers&, const ReduceStep&, Stream) noexcept { return kNotBuilt; }
Status reduce_sgd_step(const Peers&, const ReduceStep&, Stream) noexcept { return kNotBuilt; }
Status reduce_adagrad_step(const Peers&, const ReduceStep&, Stream) noexcept { return kNotBuilt; }

}  // namespace muster::kernels::cuda
