#include <string>

#include "cpp/catch.h"
#include "kernels/cuda/cuda_kernels.h"

namespace muster::kernels {
namespace {

TEST_CASE("a build without CUDA says what to rebuild with", "[kernels]") {
  if (cuda::is_built()) return;
  int capability = 0;
  const cuda::Status statuses[] = {
      cuda::check_code(capability),
      cuda::pack({}, nullptr, nullptr, false, 1, nullptr, nullptr),
      cuda::tree_sum(DType::f32, nullptr, 0, nullptr, 0, 0, nullptr),
      cuda::grad_stats(nullptr, nullptr, 0, 2, nullptr),
      cuda::finish_window(nullptr, 0, nullptr, nullptr, nullptr, nullptr, 0, {}, nullptr, nullptr, nullptr, 0, nullptr),
      cuda::count_steps(nullptr, nullptr, 0, nullptr, nullptr),
      cuda::apply_means(nullptr, nullptr, 0, nullptr, false, nullptr),
      cuda::note_loss({}, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr),
      cuda::adam_step({}, nullptr, nullptr),
      cuda::sgd_step({}, nullptr, nullptr),
      cuda::adagrad_step({}, nullptr, nullptr),
      cuda::peer_reduce({}, DType::f32, nullptr, 0, nullptr),
      cuda::reduce_adam_step({}, {}, nullptr),
      cuda::reduce_sgd_step({}, {}, nullptr),
      cuda::reduce_adagrad_step({}, {}, nullptr),
  };
  for (const cuda::Status& status : statuses) {
    CHECK(!status.ok());
    CHECK(status.code == cuda::Status::Code::not_built);
    CHECK_THAT(std::string(status.problem), ContainsSubstring("MUSTER_CUDA=ON"));
  }
}

}  // namespace
}  // namespace muster::kernels
