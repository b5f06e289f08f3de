#include "job/job_agreement.h"

#include <ATen/Context.h>
#include <ATen/ops/zeros.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <set>
#include <string_view>
#include <vector>

#include "comm/text_exchange.h"
#include "core/control_group.h"
#include "core/plain_text.h"
#include "muster/error.h"

namespace muster {

namespace {

constexpr const char* kLimit = "limit=";

// The numbers of the cores that this process may use, as words, and what limits its CPU time; none where the system
// does not say.
std::string usable_cores() {
  TextWriter words;
  if (const auto limit = cpu_limit()) words << kLimit << limit->cores << '@' << limit->group << ' ';
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) return words.str();
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &cores)) words << core << ' ';
  }
  return words.str();
}

std::string host_name() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

// The words of `of` that `than` does not have; both are of in_words.
std::string different_words(const std::string& of, const std::string& than) {
  const auto words_of = [](const std::string& text) {
    TextReader in(text);
    return std::vector<std::string>(std::istream_iterator<std::string>(in), {});
  };
  const auto others = words_of(than);
  std::string different;
  for (const auto& word : words_of(of)) {
    if (std::find(others.begin(), others.end(), word) == others.end())
      different += (different.empty() ? "" : " ") + word;
  }
  return different;
}

}  // namespace

comm::Milliseconds timeout_of(const StrategyOptions& options) {
  return comm::Milliseconds(static_cast<int64_t>(options.timeout * 1000));
}

std::string in_words(const StrategyOptions& options) {
  TextWriter out;
  const auto show = [&](const char* name, const auto& value) {
    out << name << '=';
    if (value) {
      out << *value;
    } else {
      out << "unset";
    }
    out << ' ';
  };
  constexpr const char* kPrecisions[] = {"fp32", "bf16", "fp16"};
  out << "precision=" << kPrecisions[static_cast<size_t>(options.precision)] << " loss_scale=";
  if (options.loss_scale) {
    const auto& scale = *options.loss_scale;
    out << scale.init << ',' << scale.growth << ',' << scale.backoff << ',' << scale.interval << ' ';
  } else {
    out << "unset ";
  }
  out << "fuse=" << options.fuse << " keep_gradients=" << options.keep_gradients
      << " shard_optimizer=" << options.shard_optimizer << ' ';
  out << "accumulate=" << options.accumulate << " drop_incomplete=" << options.drop_incomplete << ' ';
  show("clip_norm", options.clip_norm);
  out << "clip_norm_type=" << options.clip_norm_type << ' ';
  show("clip_value", options.clip_value);
  show("seed", options.seed);
  out << "buffers=" << (options.buffers == Buffers::mean ? "mean" : "chief") << ' ';
  show("threads_per_replica", options.threads_per_replica);
  show("bucket_bytes", options.bucket_bytes);
  out << "wire=" << (options.wire == Wire::bf16 ? "bf16" : "unset") << ' ';
  out << "max_skipped=" << options.max_skipped << " timeout=" << options.timeout;
  return out.str();
}

void compare_options(const std::string& first, const std::string& its_options, const std::string& second,
                     const std::string& options) {
  if (options == its_options) return;
  throw InvalidArgument("the ranks have different options: " + first + " has " + different_words(its_options, options) +
                        ", " + second + " has " + different_words(options, its_options) + "; pass the same everywhere");
}

void compare_options(const std::string& options, comm::Communicator& workers) {
  const auto texts = exchange_texts(workers, options);
  for (size_t r = 1; r < texts.size(); ++r) compare_options("rank 0", texts[0], "rank " + std::to_string(r), texts[r]);
}

int64_t broadcast_number(comm::Communicator& workers, int64_t number) {
  const auto value = at::zeros({1}, at::kLong);
  value.data_ptr<int64_t>()[0] = number;
  workers.broadcast(value, 0).wait();
  return value.const_data_ptr<int64_t>()[0];
}

void place_replicas(Topology& topology, comm::Communicator& workers) {
  const auto local = at::zeros({2}, at::kLong);
  local.data_ptr<int64_t>()[0] = topology.local_replicas();
  local.data_ptr<int64_t>()[1] = static_cast<int64_t>(access_between(topology.devices));
  auto work = workers.all_gather(local);
  work.wait();
  topology.replicas_of_worker.clear();
  topology.access = DeviceAccess::peer;
  for (const auto& numbers : work.outputs()) {
    const auto* const of_worker = numbers.const_data_ptr<int64_t>();
    topology.replicas_of_worker.push_back(static_cast<int>(of_worker[0]));
    topology.access = std::min(topology.access, static_cast<DeviceAccess>(of_worker[1]));
  }
  const auto first = topology.replicas_of_worker.begin();
  topology.first_replica = std::accumulate(first, first + topology.rank, 0);
  topology.num_replicas = std::accumulate(first, topology.replicas_of_worker.end(), 0);
}

int threads_of_replica(const std::vector<std::string>& hosts, const std::vector<std::string>& cores,
                       const std::vector<int>& replicas) {
  int beside_chief = 0;
  std::set<std::string> together;
  std::map<std::string, double> limits;  // by control group
  bool are_all_limited = true;
  for (size_t r = 0; r < hosts.size(); ++r) {
    if (hosts[r] != hosts[0]) continue;
    beside_chief += replicas[r];
    bool is_limited = false;
    TextReader words(cores[r]);
    for (std::string word; words >> word;) {
      if (word.rfind(kLimit, 0) != 0) {
        together.insert(word);
        continue;
      }
      std::string_view limit(word);
      limit.remove_prefix(std::string_view(kLimit).size());
      limits[word.substr(word.find('@'))] = take_number(limit);
      is_limited = true;
    }
    are_all_limited = are_all_limited && is_limited;
  }
  auto usable = static_cast<double>(together.size());
  if (are_all_limited) {
    usable = std::min(usable, std::accumulate(limits.begin(), limits.end(), 0.0,
                                              [](double sum, const auto& limit) { return sum + limit.second; }));
  }
  return std::max(static_cast<int>(usable / beside_chief), 1);
}

int agree_on_threads(const StrategyOptions& options, const Topology& topology, comm::Communicator& workers) {
  const auto hosts = exchange_texts(workers, host_name());
  const auto cores = exchange_texts(workers, usable_cores());
  const int threads =
      options.threads_per_replica.value_or(threads_of_replica(hosts, cores, topology.replicas_of_worker));
  return static_cast<int>(broadcast_number(workers, threads));
}

uint64_t agree_on_seed(const StrategyOptions& options, comm::Communicator& workers) {
  const uint64_t ambient = at::globalContext().defaultGenerator(c10::Device(c10::kCPU)).current_seed();
  return static_cast<uint64_t>(broadcast_number(workers, static_cast<int64_t>(options.seed.value_or(ambient))));
}

}  // namespace muster
