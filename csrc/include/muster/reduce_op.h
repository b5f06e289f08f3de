// ReduceOp: the operation of a reduction.
#pragma once

namespace muster {

/// How values of several replicas become one. `mean` weighs each replica by its part's size or given weight.
enum class ReduceOp { sum, mean, min, max };

}  // namespace muster
