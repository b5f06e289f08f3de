// Faults that a build with MUSTER_MUTANTS plants in the kernels, one at a time, by name in the environment variable
// MUSTER_MUTATION: tests must then fail.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>

#define MUSTER_MUTATIONS(X)         \
  X(pack_misaligned_load)           \
  X(pack_short_tail)                \
  X(pack_ignores_its_gate)          \
  X(pack_ignores_its_share)         \
  X(fold_misses_a_half)             \
  X(norm_of_squares)                \
  X(stats_short_tail)               \
  X(norm_sums_drop_the_rest)        \
  X(sum_drops_a_syncthreads)        \
  X(report_ignores_the_scale)       \
  X(report_of_a_dropped_weight)     \
  X(count_of_skipped_steps)         \
  X(buffers_without_weight)         \
  X(buffers_always_written)         \
  X(buffers_take_what_nobody_wrote) \
  X(buffers_take_the_last_integer)  \
  X(means_misaligned_store)         \
  X(means_short_tail)               \
  X(means_always_clip)              \
  X(means_of_dropped_windows)       \
  X(note_loss_always_first)         \
  X(note_loss_zeroes_late)          \
  X(note_loss_multiplies)           \
  X(metric_counts_losses)           \
  X(note_loss_reports_early)        \
  X(factors_overtake_their_readers) \
  X(factors_not_awaited)            \
  X(step_misaligned_load)           \
  X(step_short_tail)                \
  X(step_reads_the_copy_alone)      \
  X(step_forgets_a_copy)            \
  X(digest_short_tail)              \
  X(mend_always)                    \
  X(peer_short_tail)                \
  X(peers_read_the_copy_alone)      \
  X(peer_barrier_awaited_by_few)    \
  X(peer_no_closing_barrier)        \
  X(reduce_step_no_middle_barrier)  \
  X(reduce_step_no_closing_barrier)

// Those that the thread sanitizer alone can see on a host that orders stores as x86 does.
#define MUSTER_RACES(X)   \
  X(peer_relaxed_release) \
  X(peer_relaxed_acquire)

namespace muster::kernels::cuda::emulation {

#define MUSTER_MUTATION_NAME(name) name,
enum class Mutation { MUSTER_MUTATIONS(MUSTER_MUTATION_NAME) MUSTER_RACES(MUSTER_MUTATION_NAME) none };
#undef MUSTER_MUTATION_NAME

inline Mutation chosen_mutation() {
  const char* name = std::getenv("MUSTER_MUTATION");
  if (name == nullptr) return Mutation::none;
#define MUSTER_MUTATION_CHOICE(known) \
  if (std::strcmp(name, #known) == 0) return Mutation::known;
  MUSTER_MUTATIONS(MUSTER_MUTATION_CHOICE)
  MUSTER_RACES(MUSTER_MUTATION_CHOICE)
#undef MUSTER_MUTATION_CHOICE
  std::fprintf(stderr, "no mutation is called %s\n", name);
  std::_Exit(2);
}
inline const Mutation mutation = chosen_mutation();

}  // namespace muster::kernels::cuda::emulation

#define MUSTER_MUTATE(name, normal, mutated) (emulation::mutation == emulation::Mutation::name ? (mutated) : (normal))
