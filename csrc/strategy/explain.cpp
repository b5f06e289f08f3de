#include <iomanip>
#include <sstream>

#include "core/heap.h"
#include "strategy/strategy_core.h"

namespace muster {

namespace {

std::string counted(int64_t count, const std::string& what) {
  return std::to_string(count) + ' ' + what + (count == 1 ? "" : "s");
}

std::string in_bytes(int64_t bytes) {
  const bool is_large = bytes >= 1 << 20;
  std::ostringstream out;
  out << std::setprecision(3) << static_cast<double>(bytes) / (is_large ? 1 << 20 : 1 << 10)
      << (is_large ? " MiB" : " KiB");
  return out.str();
}

std::string in_words(const LinkSpeed& link) {
  std::ostringstream out;
  out << std::setprecision(3) << "a small reduction takes " << link.latency * 1e6 << " us here and a large one moves "
      << link.bandwidth / 1e9 << " GB/s";
  return out.str();
}

}  // namespace

std::string StrategyCore::explain(const std::string& name) const {
  std::ostringstream out;
  out << name << ": " << counted(topology_.num_replicas, "replica") << " in "
      << (topology_.num_workers == 1 ? "this process" : counted(topology_.num_workers, "worker")) << "; this is rank "
      << topology_.rank << (closed() ? ", closed" : "") << '\n';
  out << "replicas here:";
  for (int r = 0; r < topology_.local_replicas(); ++r) {
    out << (r == 0 ? " " : ", ") << topology_.first_replica + r << " on " << topology_.devices[static_cast<size_t>(r)];
  }
  out << "; " << counted(pool_->threads_per_replica(), "intra-op thread") << " each; "
      << (topology_.local_replicas() == 1 ? "the replica runs on the thread that calls step"
                                          : "each replica has a thread of its own");
  if (balancer_) out << "; they take " << in_words(balancer_->capacities()) << " of a batch, by capacity";
  out << '\n';
  const bool steps_together = !groups_.servers || groups_.servers->staleness == 0;
  out << "gradients: " << (steps_together ? "summed over replicas through " : "each worker's own, through ")
      << groups_.backend << ", in buckets of up to " << in_bytes(groups_.buckets.usual);
  if (options_.bucket_bytes) {
    out << ", as bucket_bytes says";
  } else if (groups_.link) {
    if (groups_.buckets.last < groups_.buckets.usual) {
      out << " (the first and the last " << in_bytes(groups_.buckets.last) << ')';
    } else {
      out << ", which a core's cache holds";
    }
    out << ": " << in_words(*groups_.link);
  }
  if (options_.wire == Wire::bf16 && topology_.num_replicas > 1) out << "; fp32 ones travel as bf16";
  out << (groups_.overlap ? "; they are reduced while backward runs" : "; they are reduced after backward") << '\n';
  out << "optimizers: ";
  if (groups_.servers) {
    out << "AdamW, Adam, SGD and Adagrad step on the servers";
    if (!steps_together) out << ", for each worker when it comes";
    if (!steps_together && groups_.servers->staleness != server::kAnyStaleness) {
      out << ", which may be " << counted(groups_.servers->staleness, "step") << " ahead of the slowest";
    }
  } else if (!options_.fuse) {
    out << "all step from .grad";
  } else {
    out << "AdamW, Adam, SGD and Adagrad step in one pass, "
        << (options_.shard_optimizer ? "each worker its shard of the state, and gather the parameters"
            : divides_steps_         ? "each replica what it owns, into the memory of all"
                                     : "on every worker")
        << "; others from .grad";
  }
  out << '\n';
  out << "window: " << options_.accumulate << " micro-batch(es)";
  if (options_.clip_norm) {
    out << ", gradient norm clipped to " << *options_.clip_norm;
    if (options_.clip_norm_type != 2) out << " (norm of type " << options_.clip_norm_type << ')';
  }
  if (options_.clip_value) out << ", gradients clipped to magnitudes of " << *options_.clip_value;
  constexpr const char* kPrecisions[] = {"fp32", "bf16", "fp16"};
  out << "; precision " << kPrecisions[static_cast<size_t>(options_.precision)] << "; seed " << seed() << '\n';
  if (topology_.devices.front().is_cpu()) {
    out << "memory: large blocks that are freed "
        << (keep_freed_memory() ? "stay with this process, for the next step" : "go where the C library sends them")
        << '\n';
  }
  return out.str();
}

}  // namespace muster
