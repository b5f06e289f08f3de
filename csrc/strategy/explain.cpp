#include "strategy/explain.h"

#include <iomanip>

#include "core/heap.h"
#include "core/plain_text.h"
#include "window/device_shares.h"

namespace muster {

namespace {

std::string counted(int64_t count, const std::string& what) {
  return std::to_string(count) + ' ' + what + (count == 1 ? "" : "s");
}

std::string in_bytes(int64_t bytes) {
  const bool is_large = bytes >= 1 << 20;
  TextWriter out;
  out << std::setprecision(3) << static_cast<double>(bytes) / (is_large ? 1 << 20 : 1 << 10)
      << (is_large ? " MiB" : " KiB");
  return out.str();
}

std::string in_words(const LinkSpeed& link) {
  TextWriter out;
  out << std::setprecision(3) << "a small reduction takes " << link.latency * 1e6 << " us here and a large one moves "
      << link.bandwidth / 1e9 << " GB/s";
  return out.str();
}

}  // namespace

std::string explain(Session& session, const std::string& name) {
  const auto& topology = session.topology();
  const auto& groups = session.groups();
  const auto& options = session.options();
  const auto& capacities = session.capacities();
  TextWriter out;
  out << name << ": " << counted(topology.num_replicas, "replica") << " in "
      << (topology.num_workers == 1 ? "this process" : counted(topology.num_workers, "worker")) << "; this is rank "
      << topology.rank << (session.closed() ? ", closed" : "") << '\n';
  out << "replicas here:";
  for (int r = 0; r < topology.local_replicas(); ++r) {
    out << (r == 0 ? " " : ", ") << topology.first_replica + r << " on " << topology.devices[static_cast<size_t>(r)];
  }
  out << "; " << counted(session.pool().threads_per_replica(), "intra-op thread") << " each; "
      << (topology.local_replicas() == 1 ? "the replica runs on the thread that calls step"
                                         : "each replica has a thread of its own");
  if (!capacities.empty()) out << "; they take " << in_words(capacities) << " of a batch, by capacity";
  out << '\n';
  const bool steps_together = !groups.deals_batches();
  out << "gradients: " << (steps_together ? "summed over replicas through " : "each worker's own, through ")
      << groups.backend;
  if (groups.servers && topology.local_replicas() > 1) out << ", where this worker pushes those of its replicas as one";
  out << ", in buckets of up to " << in_bytes(groups.buckets.usual);
  if (options.bucket_bytes) {
    out << ", as bucket_bytes says";
  } else if (groups.link) {
    if (groups.buckets.last < groups.buckets.usual) {
      out << " (the first and the last " << in_bytes(groups.buckets.last) << ')';
    } else {
      out << ", which a core's cache holds";
    }
    out << ": " << in_words(*groups.link);
  }
  if (options.wire == Wire::bf16 && topology.num_replicas > 1) {
    const auto& group = *groups.gradients.front();
    const bool is_widened = group.device().is_cpu() && group.peer_memory() == nullptr;
    out << (is_widened ? "; fp32 ones are rounded to bf16, and travel as fp32 through process groups"
                       : "; fp32 ones travel as bf16");
  }
  out << (groups.overlap ? "; they are reduced while backward runs" : "; they are reduced after backward") << '\n';
  out << "optimizers: ";
  if (groups.servers) {
    out << "AdamW, Adam, SGD and Adagrad step on the servers";
    if (!steps_together) out << ", for each worker when it comes";
    if (!steps_together && groups.servers->staleness != server::kAnyStaleness) {
      out << ", which may be " << counted(groups.servers->staleness, "step") << " ahead of the slowest";
    }
  } else if (!options.fuse) {
    out << "all step from .grad";
  } else {
    const bool divides = devices_divide(topology, options);
    out << "AdamW, Adam, SGD and Adagrad step in one pass, "
        << (divides && topology.num_workers > 1 && options.shard_optimizer
                ? "each device its part of its worker's shard of the state, and gather the parameters"
            : divides                 ? "each device its shard of the state, and store the parameters to all"
            : options.shard_optimizer ? "each worker its shard of the state, and gather the parameters"
            : session.divides_steps() ? "each replica what it owns, into the memory of all"
                                      : "on every worker")
        << "; others from .grad";
  }
  out << '\n';
  out << "window: " << options.accumulate << " micro-batch(es)";
  if (options.clip_norm) {
    out << ", gradient norm clipped to " << *options.clip_norm;
    if (options.clip_norm_type != 2) out << " (norm of type " << options.clip_norm_type << ')';
  }
  if (options.clip_value) out << ", gradients clipped to magnitudes of " << *options.clip_value;
  constexpr const char* kPrecisions[] = {"fp32", "bf16", "fp16"};
  out << "; precision " << kPrecisions[static_cast<size_t>(options.precision)] << "; seed " << session.streams().seed()
      << '\n';
  if (topology.devices.front().is_cpu()) {
    out << "memory: large blocks that are freed "
        << (keeps_freed_memory() ? "stay with this process, for the next step" : "go where the C library sends them")
        << '\n';
  }
  return out.str();
}

}  // namespace muster
