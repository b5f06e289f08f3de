// What user code does between a window's end and the optimizers' steps, and what becomes of windows without optimizers.
#include <cstring>

#include "comm/text_exchange.h"
#include "core/log.h"
#include "muster/error.h"
#include "strategy/strategy_core.h"

namespace muster {

void StrategyCore::call_hooks(int number, bool fused, bool is_first, const std::function<void()>& hooks) {
  auto& set = *sets_.at(static_cast<size_t>(number));
  const bool edits = fused && options_.keep_gradients && set.servers() == nullptr;
  std::exception_ptr error;
  Failure failure;
  kernels::StepScalars* scalars = nullptr;  // that the host steps by; null: nothing was edited, or the device has them
  try {
    if (edits) {
      scalars = set.leave_means(hooks);
    } else {
      hooks();
    }
  } catch (...) {
    error = std::current_exception();
    failure = failures_.describe(error);
  }
  if (set.servers() != nullptr) {
    hook_error_ = error;  // the others step, and servers wait for this worker to
    return;
  }
  if (failure.kind == Failure::Kind::transport) std::rethrow_exception(error);
  if (groups_.workers->size() > 1) {
    const std::string outcome = is_first ? "the window was dropped on all ranks and training can go on"
                                         : "optimizers before that one have stepped on all ranks, it and later ones "
                                           "on none, and training can go on";
    std::string bytes;
    if (scalars != nullptr) bytes.assign(reinterpret_cast<const char*>(scalars), sizeof *scalars);
    const auto texts =
        exchange_texts(*groups_.workers, failure ? 'f' + failure.type + '\n' + failure.text : 's' + bytes);
    for (size_t rank = 0; rank < texts.size() && !error; ++rank) {
      const auto& text = texts[rank];
      if (text.empty() || text.front() != 'f') continue;
      const auto end = text.find('\n');
      const auto type = text.substr(1, end - 1);
      const auto what = text.substr(end + 1);
      int replica = 0;
      for (size_t before = 0; before < rank; ++before) replica += topology_.replicas_of_worker[before];
      error = std::make_exception_ptr(RemoteError(static_cast<int>(rank), replica, type, what,
                                                  "a hook before the optimizer's step on rank " + std::to_string(rank) +
                                                      " raised " + type + ": " + what + "; " + outcome));
    }
    // Every rank steps by what rank 0 has: its hooks may have left other means.
    if (!error && scalars != nullptr) std::memcpy(scalars, texts.front().data() + 1, sizeof *scalars);
  }
  if (!error) return;
  awaited_ = 0;  // no rank steps
  if (is_first) --steps_;
  std::rethrow_exception(error);
}

void StrategyCore::note_no_optimizer(int number) {
  if (warned_of_no_optimizer_) return;
  uint64_t versions = 0;
  for (const int p : sets_.at(static_cast<size_t>(number))->trainable())
    versions += registry_.parameter(0, static_cast<size_t>(p))._version();
  const auto [last, is_first] = versions_without_optimizer_.try_emplace(number, versions);
  if (!is_first && std::exchange(last->second, versions) == versions) {
    warned_of_no_optimizer_ = true;
    log(LogLevel::warning,
        "no optimizer is prepared, and no parameter was written between two steps: the gradients of the first were "
        "replaced unused; prepare() the optimizer, or step it by hand after each strategy step");
  }
}

}  // namespace muster
