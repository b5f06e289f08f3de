// What became of the parameters where communication failed.
#pragma once

#include "muster/error.h"

namespace muster {

/// Parameters, the optimizer's state and what is derived from them, in this process.
enum class Parameters {
  whole,  ///< those that the last step left: they can be saved and trained on
  torn,   ///< they may be partly those before a step and partly those after it: go on from what was saved last
};

/// After an error of a strategy's step or flush; after any other `whole`. The message says it too. Thread-safe.
Parameters parameters_after(const CommError& error) noexcept;

}  // namespace muster
