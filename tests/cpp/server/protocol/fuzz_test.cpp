// Bounded runs of the fuzz target, and mutated frames at a server that works.
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "cpp/catch.h"
#include "net/channel.h"
#include "server/protocol/chunk_parts.h"
#include "server/protocol/protocol.h"
#include "server/shard/quorum.h"
#include "support/protocol_fuzzer.h"
#include "support/run_ranks.h"
#include "support/servers.h"

using namespace muster;
using namespace muster::server;

namespace {

struct Sample {
  uint16_t type;
  std::string message;
};

template <class Message>
Sample sample(const Message& message) {
  return {Message::kType, encode(message)};
}

FlatGroups two_groups() {
  return std::vector<kernels::SgdGroup>{{1, 0.9, 0, 0, true, false}, {2, 0, 0, 0, false, false}};
}

Plan plan_with_table() {
  Plan plan = testing::small_plan(1, 1, two_groups());
  plan.tables = {{"rows", 100, 4, RowPlacement::modulo, {}, 1}};
  return plan;
}

// One of each kind that a worker sends.
std::vector<Sample> requests() {
  Apply apply;
  apply.step = 1;
  apply.members = {0, 1};
  apply.groups = two_groups();
  apply.unused = {3};
  apply.unused_tables = {0};
  return {sample(Hello{5, 1, 0}),
          sample(Configure{0, plan_with_table(), 0, "facts"}),
          sample(Write{1, Part::state0}),
          sample(Read{2, Part::parameter, 0, true, 4096}),
          sample(Join{0, true, 1, {{0, 1, 2}}, {{0, 1, 3}}}),
          sample(Resume{0, {}}),
          sample(Push{1, 1}),
          sample(Commit{0, {1, 2, 3}, "record", 0, true}),
          sample(Decision{1, {0}, {0}, {7}, {"note"}, {0}, {true, 0}}),
          sample(Sum{1, {0}}),
          sample(apply),
          sample(Beat{false}),
          sample(Recall{}),
          sample(Leave{}),
          sample(Deal{1, 2, 3, 4, false, {5}}),
          sample(Inquire{}),
          sample(PushRows{1, 0, 0, 1}),
          sample(PullRows{0, 0, true, 4096}),
          sample(WriteRows{0}),
          sample(WriteRowSteps{0, 1}),
          sample(FetchRows{0, 0, 0, 0}),
          sample(WritePart{0, 1, "/tmp/.partial-snapshot-0000000000", {0}, {0}, {0}})};
}

std::string mutated(std::string bytes, std::minstd_rand& random) {
  for (unsigned i = random() % 4; i > 0 && !bytes.empty(); --i) {
    const size_t at = random() % bytes.size();
    switch (random() % 5) {
      case 0:
        bytes[at] = static_cast<char>(random());
        break;
      case 1:
        bytes[at] = static_cast<char>(random() % 2 == 0 ? 0xff : 0);
        break;
      case 2:
        bytes.resize(at);
        break;
      case 3:
        bytes.insert(at, 1 + random() % 8, static_cast<char>(random()));
        break;
      default:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << (random() % 8)));
    }
  }
  return bytes;
}

std::string bytes_of(const std::vector<int64_t>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t)};
}

// What a server would take with this request, where it is one: else it refuses before anything is applied.
std::string fitting_payload(const Plan& plan, uint16_t type, const std::string& message, std::minstd_rand& random) {
  const auto chunks = cut_chunks(plan);
  try {
    if (type == Write::kType) {
      const auto write = decode<Write>(message);
      const auto& chunk = chunks.at(write.chunk);
      return std::string(
          static_cast<size_t>(numel_of(chunk, write.part)) * c10::elementSize(dtype_of(chunk, write.part)), 'w');
    }
    if (type == Push::kType) {
      return std::string(static_cast<size_t>(chunks.at(decode<Push>(message).chunk).gradient_bytes()), 'p');
    }
  } catch (const std::exception&) {
    return {};
  }
  if (type != PushRows::kType && type != PullRows::kType && type != WriteRows::kType) return {};
  std::vector<int64_t> rows(1 + random() % 4);
  for (auto& row : rows) row = static_cast<int64_t>(random() % 120) - 5;  // the table has 100
  if (random() % 2 == 0) std::sort(rows.begin(), rows.end());
  const size_t dim = static_cast<size_t>(plan.tables.front().dim);
  return bytes_of(rows) + (type == PullRows::kType ? "" : std::string(rows.size() * dim * sizeof(float), 'r'));
}

// The address space may grow by so much from here.
void limit_memory(uint64_t bytes) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlim_t limit = pages * static_cast<uint64_t>(::sysconf(_SC_PAGE_SIZE)) + bytes;
  const rlimit limits{limit, limit};
  MUSTER_CHECK(::setrlimit(RLIMIT_AS, &limits) == 0);
#else
  (void)bytes;
#endif
}

void fuzz_decoders(std::chrono::steady_clock::time_point end, unsigned seed) {
  std::minstd_rand random(seed);
  auto samples = requests();
  for (const auto& more :
       {sample(Welcome{1, 2}), sample(Refusal{Refusal::Kind::fenced, "text"}), sample(Values{1, 2}),
        sample(Partials{{{1, 2, 3, 4}, 5, 6}}), sample(Recalled{{1, 2}}), sample(Dealt{}),
        sample(Passes{{{1, 2, 3, 4, {0, 1}}}}), sample(Standing{true, 1, {0, 2}, "facts", "token"}),
        sample(Configured{true, true, true, true, 1, 2, 4, {3}, {}}), sample(Beaten{{1, 2}, "text", 3}),
        sample(Busy{1, 2}), sample(Joined{1, {{0, 2}}}), sample(FetchedRows{2, 1})}) {
    samples.push_back(more);
  }
  for (int round = 0; round % 1024 != 0 || std::chrono::steady_clock::now() < end; ++round) {
    const auto& chosen = samples[random() % samples.size()];
    std::string bytes;
    if (round % 4 == 0) {
      bytes.resize(random() % 200);
      for (char& byte : bytes) byte = static_cast<char>(random());
    } else if (round % 4 == 1) {
      const auto header = net::encode({chosen.type, net::Placement::in_sender, chosen.message.size(), 64, 4096});
      bytes = mutated({reinterpret_cast<const char*>(header.data()), header.size()}, random);
    } else {
      bytes = static_cast<char>(chosen.type) + mutated(chosen.message, random);
    }
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  }
}

// In two processes; what went wrong.
std::string fuzz_decoders_for(std::chrono::seconds duration, unsigned seed) {
  const auto fuzz = [&](int rank) {
    limit_memory(uint64_t{128} << 20);
    fuzz_decoders(std::chrono::steady_clock::now() + duration, seed + static_cast<unsigned>(rank));
  };
  return testing::run_processes(2, fuzz, nullptr, 2 * duration);
}

}  // namespace

TEST_CASE("nothing that a peer sends crashes a decoder or takes much memory", "[server]") {
  CHECK(fuzz_decoders_for(std::chrono::seconds(20), 1) == "");
}

TEST_CASE("decoders for longer", "[server][.][long]") { CHECK(fuzz_decoders_for(std::chrono::minutes(5), 3) == ""); }

TEST_CASE("mutated frames do not disturb a server's workers", "[server]") {
  const auto in = [](int ms) { return std::chrono::steady_clock::now() + std::chrono::milliseconds(ms); };
  const Plan plan = plan_with_table();
  const testing::Servers running(testing::server_names(1));
  ClientConfig config;
  config.servers = running.names;
  config.plan = plan;
  testing::Worker worker(config);
  worker.join();
  worker.step(1);

  std::minstd_rand random(7);
  const auto samples = requests();
  for (int connection = 0; connection < 200; ++connection) {
    const net::FileDescriptor raw = net::connect_to(running.names[0], SOCK_STREAM);
    std::string bytes;
    const auto add = [&](const net::FrameHeader& header, const std::string& message) {
      const auto encoded = net::encode(header);
      bytes.append(reinterpret_cast<const char*>(encoded.data()), encoded.size());
      bytes += message;
    };
    add({0, net::Placement::in_sender, 0, 0, 0}, "");
    const std::string hello = encode(Hello{100 + static_cast<uint32_t>(connection), 0, 0});
    add({Hello::kType, net::Placement::follows, hello.size(), 0, 0}, hello);
    for (int i = 0; i < 5; ++i) {
      const auto& chosen = samples[random() % samples.size()];
      if (chosen.type == Configure::kType && i > 0) continue;  // the others are many
      std::string message = mutated(chosen.message, random);
      if (chosen.type == Write::kType) {
        message = encode(Write{static_cast<uint32_t>(random() % 4), Part::parameter});
        message.back() = static_cast<char>(random() % 12);  // the part, of which there are 6
      }
      auto payload = fitting_payload(plan, chosen.type, message, random);
      if (random() % 3 == 0) payload.resize(random() % 5000, 'p');
      add({chosen.type, net::Placement::follows, message.size(), payload.size(), 0}, message + payload);
    }
    if (random() % 3 == 0) bytes = mutated(bytes, random);
    if (random() % 4 == 0) bytes.resize(random() % bytes.size());
    size_t sent = 0;
    while (sent < bytes.size()) {
      const ssize_t n = ::send(raw.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n <= 0) break;
      sent += static_cast<size_t>(n);
    }
    ::shutdown(raw.get(), SHUT_WR);
    if (connection % 10 == 0) net::wait_readable({raw.get()}, in(2'000));
  }
  // What the fuzzer may do as a worker of its own, it may: others go on.
  worker.push(2);
  worker.client.flush();
  CHECK(worker.client.chunks().size() > 0);
  CHECK(worker.parameters(1).size() == plan.parameters.size());
}
