#include "checkpoint/draft.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/sha256.h"
#include "cpp/catch.h"
#include "cpp/checkpoint/texts.h"
#include "muster/error.h"
#include "net/job_secret.h"
#include "support/folder.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::checkpoint;
namespace fs = std::filesystem;

using testing::message_of;

namespace {

// A tensor of 3 x 4, of which writer w of `writers` has every elements / writers, and one that writer 0 has alone.
const at::Tensor& divided() {
  static const at::Tensor tensor = at::arange(12, at::kLong).view({3, 4});
  return tensor;
}

NextRuns once(std::vector<Run> runs) {
  return [runs = std::move(runs)]() mutable { return std::exchange(runs, {}); };
}

Run run_of(int64_t begin, int64_t end) {
  return {"divided", divided().sizes().vec(), begin, divided().flatten().slice(0, begin, end)};
}

void write_both(const fs::path& draft, const SnapshotOptions& options = {}) {
  write_part(draft, "worker-0", once({run_of(0, 5), run_of(9, 12), Run::whole("own", at::zeros({}))}), options);
  write_part(draft, "worker-1", once({run_of(5, 9), Run::whole("empty", at::empty({0, 3}))}), options);
}

const std::vector<std::string> kBoth{"worker-0", "worker-1"};

}  // namespace

TEST_CASE("parts of several writers make one snapshot", "[checkpoint]") {
  const testing::Folder folder;
  const bool is_signed = GENERATE(false, true);
  SnapshotOptions options{.shard_bytes = GENERATE(uint64_t{1}, uint64_t{1} << 30)};
  options.secret = is_signed ? std::optional<net::JobSecret>("a secret of this test") : std::nullopt;
  write_snapshot(folder.path, {{{"before", at::zeros({2})}}, {}}, options);
  const auto draft = begin_draft(folder.path);
  CHECK_FALSE(has_part(draft, "worker-0"));
  write_both(draft, options);
  CHECK(has_part(draft, "worker-0"));
  const auto path = finish_draft(draft, kBoth, {{"steps", int64_t{5}}}, options);
  CHECK(path == folder.path / "snapshot-0000000002");
  CHECK_FALSE(fs::exists(draft));
  SnapshotReader reader(path, options.secret);
  CHECK(std::get<int64_t>(reader.metadata().at("steps")) == 5);
  const auto back = reader.rest();
  CHECK(back.tensors.size() == 3);
  CHECK(back.tensors.at("divided").equal(divided()));
  CHECK(back.tensors.at("empty").sizes() == at::IntArrayRef({0, 3}));
  CHECK(back.tensors.at("own").dim() == 0);
  for (const auto& entry : fs::directory_iterator(path)) CHECK(entry.path().extension() != ".part.json");
}

TEST_CASE("a run that is all of a tensor has its shape", "[checkpoint]") {
  const testing::Folder folder;
  const auto draft = begin_draft(folder.path);
  write_part(draft, "worker-0", once({run_of(0, 12)}), {});
  const auto path = finish_draft(draft, {"worker-0"}, {}, {});
  CHECK(read_snapshot(path).tensors.at("divided").equal(divided()));
}

TEST_CASE("tensors of parts have other names in the snapshot, and what else is in the draft goes", "[checkpoint]") {
  const testing::Folder folder;
  const auto draft = begin_draft(folder.path);
  write_both(draft);
  std::ofstream(draft / "rows") << "of somebody";
  fs::create_directory(draft / "folder");
  const auto refusal = [&](const std::map<std::string, std::string>& names) {
    return message_of<CheckpointError>([&] { finish_draft(draft, kBoth, {}, {}, names); });
  };
  CHECK(refusal({{"lost", "found"}}).find("no part has tensor 'lost', which is 'found'") != std::string::npos);
  CHECK(refusal({{"own", "divided"}}).find("parts have two tensors 'divided'") != std::string::npos);
  const auto path = finish_draft(draft, kBoth, {}, {}, {{"divided", "a/whole"}, {"own", "its"}});
  const auto back = read_snapshot(path);
  CHECK(back.tensors.size() == 3);
  CHECK(back.tensors.at("a/whole").equal(divided()));
  CHECK(back.tensors.contains("its"));
  for (const auto& entry : fs::directory_iterator(path)) {
    CHECK((entry.path().extension() == ".safetensors" || entry.path().filename() == kManifest));
  }
}

TEST_CASE("parts that are not one snapshot are refused, and the one before stays", "[checkpoint]") {
  const testing::Folder folder;
  const auto before = write_snapshot(folder.path, {{{"before", at::zeros({2})}}, {}}, {.keep = 1});
  const auto draft = begin_draft(folder.path);
  write_part(draft, "worker-0", once({run_of(0, 5)}), {});
  const auto refusal = [&](const std::vector<std::string>& writers) {
    return message_of<CheckpointError>([&] { finish_draft(draft, writers, {}, {.keep = 1}); });
  };
  SECTION("missing elements") {
    CHECK(refusal({"worker-0"}).find("tensor 'divided' leave a gap at element 5") != std::string::npos);
    write_part(draft, "worker-1", once({run_of(6, 12)}), {});
    CHECK(refusal(kBoth).find("tensor 'divided' leave a gap at element 5") != std::string::npos);
  }
  SECTION("elements that two have") {
    write_part(draft, "worker-1", once({run_of(4, 12)}), {});
    CHECK(refusal(kBoth).find("tensor 'divided' overlap at element 4") != std::string::npos);
  }
  SECTION("another shape or dtype") {
    write_part(draft, "worker-1", once({{"divided", {12}, 5, divided().flatten().slice(0, 5)}}), {});
    CHECK(refusal(kBoth).find("'divided' has another dtype or shape in the part of worker-1") != std::string::npos);
    const auto floats = run_of(5, 12).elements.to(at::kFloat);
    write_part(draft, "worker-2", once({{"divided", {3, 4}, 5, floats}}), {});
    CHECK(refusal({"worker-0", "worker-2"}).find("in the part of worker-2") != std::string::npos);
  }
  SECTION("a part that is not there") { CHECK(refusal(kBoth).find("worker-1.part.json") != std::string::npos); }
  SECTION("a part that is damaged") {
    write_part(draft, "worker-1", once({run_of(5, 12)}), {});
    std::ofstream(draft / "worker-1.part.json", std::ios::app) << "x";
    CHECK(refusal(kBoth).find("worker-1.part.json") != std::string::npos);
  }
  SECTION("a part that another secret signed") {
    write_part(draft, "worker-1", once({run_of(5, 12)}), {.secret = "another one"});
    CHECK_THROWS_WITH(finish_draft(draft, kBoth, {}, {.secret = "the job's"}),
                      ContainsSubstring("give all workers and servers of the job one secret"));
  }
  CHECK(read_newest_snapshot(folder.path)->folder == before);
  drop_draft(draft);
  CHECK_FALSE(fs::exists(draft));
}

TEST_CASE("writers of a draft learn of one that failed, and of a draft that is gone", "[checkpoint]") {
  const testing::Folder folder;
  const auto draft = begin_draft(folder.path);
  const auto full = [] { return std::vector<Run>{Run::whole("a", at::zeros({2}, at::kComplexDouble))}; };
  CHECK_THROWS_AS(write_part(draft, "server-1", full, {}), InvalidArgument);
  CHECK_FALSE(has_part(draft, "server-1"));
  fail_part(draft, "server-1", "its disk is full");
  CHECK(message_of<CheckpointError>([&] { has_part(draft, "server-1"); }) ==
        "server-1 could not write its part: its disk is full");
  for (const std::string name : {"", "a/b", "..", "-a", "a b"}) {
    CHECK_THROWS_AS(write_part(draft, name, once({}), {}), InvalidArgument);
  }
  const auto later = begin_draft(folder.path);  // another writer's, which removes what it takes for a dead one's
  CHECK(later != draft);
  CHECK(message_of<CheckpointError>([&] { has_part(draft, "server-1"); }).find("is gone") != std::string::npos);
  CHECK(message_of<CheckpointError>([&] { write_part(draft, "server-1", once({}), {}); }).find("is gone") !=
        std::string::npos);
  fail_part(draft, "server-1", "nobody hears it");
}

TEST_CASE("a part is of one draft and one writer, and no snapshot", "[checkpoint]") {
  const testing::Folder folder;
  SnapshotOptions options;
  options.secret = has_sha256() ? std::optional<net::JobSecret>("a secret of this test") : std::nullopt;
  const auto other = begin_draft(folder.path / "others");
  write_part(other, "worker-1", once({run_of(5, 12)}), options);
  const auto draft = begin_draft(folder.path / "mine");
  write_part(draft, "worker-0", once({run_of(0, 5)}), options);
  const auto take = [&](const std::string& from, const fs::path& to) {
    for (const auto& entry : fs::directory_iterator(other)) {
      const auto name = entry.path().filename().string();
      if (name.starts_with(from)) fs::copy_file(entry.path(), to, fs::copy_options::overwrite_existing);
    }
  };
  take("worker-1-", draft / "worker-1-00000.safetensors");
  take("worker-1.part", draft / "worker-1.part.json");
  CHECK(message_of<CheckpointError>([&] {
          finish_draft(draft, kBoth, {}, options);
        }).find("is the part of another snapshot or writer") != std::string::npos);
  if (!options.secret) return;
  write_part(other, "worker-2", once({Run::whole("whole", at::zeros({2}))}), options);
  fs::rename(other / "worker-2.part.json", other / "manifest.json");
  CHECK_THROWS_AS(SnapshotReader(other, options.secret), CheckpointError);
}

TEST_CASE("elements are given once, and empty runs are left out", "[checkpoint]") {
  const testing::Folder folder;
  const auto draft = begin_draft(folder.path);
  const SnapshotOptions a_file_each{.shard_bytes = 1};
  std::vector<std::vector<Run>> parts{{run_of(0, 5)}, {run_of(4, 12)}};
  const auto one_by_one = [&]() -> std::vector<Run> {
    if (parts.empty()) return {};
    auto first = std::move(parts.front());
    parts.erase(parts.begin());
    return first;
  };
  CHECK_THROWS_WITH(write_part(draft, "worker-0", one_by_one, a_file_each), ContainsSubstring("'divided' twice"));
  write_part(draft, "worker-1", once({run_of(0, 0), run_of(0, 12), run_of(4, 4), run_of(12, 12)}), {});
  CHECK(read_snapshot(finish_draft(draft, {"worker-1"}, {}, {})).tensors.at("divided").equal(divided()));
}

TEST_CASE("a writer waits while others write their parts", "[checkpoint]") {
  const testing::Folder folder;
  const auto draft = begin_draft(folder.path);
  std::thread other([&] { write_part(draft, "worker-1", once({run_of(5, 12)}), {}); });
  write_part(draft, "worker-0", once({run_of(0, 5)}), {});
  while (!has_part(draft, "worker-1")) std::this_thread::yield();
  const auto path = finish_draft(draft, kBoth, {}, {});
  other.join();
  CHECK(read_snapshot(path).tensors.at("divided").equal(divided()));
}
