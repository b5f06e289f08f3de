#include "checkpoint/joint_snapshot.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <chrono>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cpp/catch.h"
#include "support/folder.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::checkpoint;
namespace fs = std::filesystem;

using std::chrono::milliseconds;
using testing::message_of;

namespace {

// Two tensors that are cut, and others that are not.
NamedTensors alike() {
  return {{"a/large", at::arange(300'001, at::kFloat)},
          {"a/scalar", at::full({}, 7.0)},
          {"b/empty", at::empty({0, 3})},
          {"b/gaps", at::arange(600'000, at::kFloat).view({600, 1000}).t()},
          {"c/rows", at::arange(400'000, at::kDouble).view({1000, 400})},
          {"z/empty", at::empty({0})}};
}

const at::Tensor& scattered() {
  static const at::Tensor tensor = at::arange(1000, at::kFloat).view({10, 100});
  return tensor;
}

// What rank r of n has: of the divided tensor the part that begins at 1000 r / n, but rank 0 nothing.
JointContent content_of(int rank, int ranks) {
  JointContent content{.alike = alike()};
  const int64_t parts = ranks - 1;
  const int64_t begin = rank == 0 ? 0 : 1000 * (rank - 1) / parts;
  const int64_t end = rank == 0 ? 0 : 1000 * rank / parts;
  content.divided.push_back({"divided", {10, 100}, begin, scattered().flatten().slice(0, begin, end)});
  if (rank == 0) content.chiefs = {{"own", at::ones({5})}};
  return content;
}

Snapshot whole() {
  auto tensors = alike();
  tensors["divided"] = scattered();
  tensors["own"] = at::ones({5});
  return {std::move(tensors), {{"steps", int64_t{3}}}};
}

bool are_equal(const Snapshot& a, const Snapshot& b) {
  return a.metadata == b.metadata && std::ranges::equal(a.tensors, b.tensors, [](const auto& x, const auto& y) {
           return x.first == y.first && x.second.scalar_type() == y.second.scalar_type() &&
                  x.second.sizes() == y.second.sizes() && x.second.equal(y.second);
         });
}

// The ranks of a job in one thread: what they tell each other is handed on.
struct Job {
  Job(const std::vector<fs::path>& folders, const SnapshotOptions& options = {}) {
    for (const auto& folder : folders) writers.push_back(std::make_unique<SnapshotWriter>(folder, options));
  }

  int size() const { return static_cast<int>(writers.size()); }

  // Whether all copied.
  bool copy(const std::vector<JointContent>& contents) {
    joints.clear();
    announced.clear();
    for (int r = 0; r < size(); ++r) {
      joints.push_back(std::make_unique<JointSnapshot>(*writers[static_cast<size_t>(r)], r, size()));
    }
    for (const auto& joint : joints) announced.push_back(joint->announce());
    std::vector<std::string> looked;
    for (size_t r = 0; r < joints.size(); ++r) looked.push_back(joints[r]->look(announced, contents[r]));
    std::vector<bool> are_joint;
    for (const auto& joint : joints) are_joint.push_back(joint->copy(looked));
    for (const bool is_joint : are_joint) CHECK(is_joint == are_joint.front());
    return are_joint.front();
  }

  bool copy() {
    std::vector<JointContent> contents;
    for (int r = 0; r < size(); ++r) contents.push_back(content_of(r, size()));
    return copy(contents);
  }

  void start(int rank, milliseconds patience = milliseconds(60'000)) {
    joints[static_cast<size_t>(rank)]->start(rank == 0 ? whole().metadata : Metadata(), patience);
  }

  std::string error_of(int rank) {
    return message_of<CheckpointError>([&] { writers[static_cast<size_t>(rank)]->wait(); });
  }

  // Of a rank's first file.
  fs::path file_of(int rank, const fs::path& folder) const {
    const auto end = announced.front().find('\n');
    return folder / announced.front().substr(0, end) /
           ("worker-" + std::to_string(rank) + '-' + announced.front().substr(end + 1) + "-00000.safetensors");
  }

  std::vector<std::unique_ptr<SnapshotWriter>> writers;
  std::vector<std::unique_ptr<JointSnapshot>> joints;
  std::vector<std::string> announced;
};

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename());
  std::ranges::sort(names);
  return names;
}

}  // namespace

TEST_CASE("each element of tensors that all ranks have is written by one of them", "[checkpoint]") {
  const auto tensors = alike();
  uint64_t all = 0;
  for (const auto& [name, tensor] : tensors) all += tensor.nbytes();
  const int ranks = GENERATE(2, 3, 7);
  const uint64_t chiefs = GENERATE(uint64_t{0}, uint64_t{1'000'000}, uint64_t{1} << 40);
  std::map<std::string, int64_t> next;
  std::vector<uint64_t> bytes;
  for (int rank = 0; rank < ranks; ++rank) {
    bytes.push_back(rank == 0 ? chiefs : 0);
    for (const auto& run : share_of(tensors, rank, ranks, chiefs)) {
      CHECK(run.begin == next[run.name]);
      CHECK(run.elements.flatten().equal(
          tensors.at(run.name).flatten().slice(0, run.begin, run.begin + run.elements.numel())));
      next[run.name] += run.elements.numel();
      bytes.back() += run.elements.nbytes();
    }
  }
  CHECK(next.size() == tensors.size());
  for (const auto& [name, tensor] : tensors) CHECK(next.at(name) == tensor.numel());
  // The matrix with gaps is not cut: 2.4 MB.
  const uint64_t least = chiefs > all ? 0 : (all + chiefs) / static_cast<uint64_t>(ranks);
  for (size_t rank = chiefs > all ? 1 : 0; rank < bytes.size(); ++rank) {
    CHECK(bytes[rank] <= std::max(least, all / static_cast<uint64_t>(ranks - 1)) + 2'500'000);
  }
}

TEST_CASE("what ranks write together is what one writes alone", "[checkpoint]") {
  const testing::Folder folder;
  const testing::Folder of_one;
  SnapshotOptions options{.keep = 1};
  options.secret = GENERATE(std::optional<net::JobSecret>(), std::optional<net::JobSecret>("a secret of this test"));
  Job job(std::vector<fs::path>(GENERATE(size_t{2}, size_t{3}), folder.path), options);
  for (int time = 1; time <= 2; ++time) {
    REQUIRE(job.copy());
    for (int rank = job.size() - 1; rank >= 0; --rank) job.start(rank);
    for (const auto& writer : job.writers) writer->wait();
    CHECK(job.writers.front()->written() == folder.path / ("snapshot-000000000" + std::to_string(time)));
  }
  CHECK(job.writers.back()->written().empty());
  const auto path = job.writers.front()->written();
  CHECK(names_in(folder.path) == std::vector<std::string>{"life", "lock", path.filename()});
  for (const auto& name : names_in(path)) {
    CHECK((name == "manifest.json" || (name.starts_with("worker-") && name.ends_with(".safetensors"))));
  }
  CHECK(names_in(path).size() == job.writers.size() + 1);
  SnapshotReader reader(path, options.secret);
  const auto alone = write_snapshot(of_one.path, whole(), options);
  CHECK(are_equal(reader.rest(), SnapshotReader(alone, options.secret).rest()));
}

TEST_CASE("ranks copy what they write, and no more", "[checkpoint]") {
  const testing::Folder folder;
  Job job({folder.path, folder.path});
  auto contents = std::vector<JointContent>{content_of(0, 2), content_of(1, 2)};
  for (auto& content : contents) content.alike["a/large"] = at::zeros({300'001});
  REQUIRE(job.copy(contents));
  for (auto& content : contents) content.alike["a/large"].fill_(1);
  for (int rank = 0; rank < 2; ++rank) job.start(rank);
  for (const auto& writer : job.writers) writer->wait();
  CHECK(read_snapshot(job.writers.front()->written()).tensors.at("a/large").equal(at::zeros({300'001})));
}

TEST_CASE("ranks that do not see the chief's folder, or have other tensors, write nothing", "[checkpoint]") {
  const testing::Folder folder;
  const testing::Folder other;
  SECTION("another folder") {
    Job job({folder.path, folder.path, other.path});
    CHECK_FALSE(job.copy());
  }
  SECTION("another tensor") {
    Job job({folder.path, folder.path});
    std::vector<JointContent> contents{content_of(0, 2), content_of(1, 2)};
    const auto what = GENERATE("name", "shape", "dtype", "gaps", "values", "an element");
    auto& tensors = contents[1].alike;
    if (what == std::string("name")) tensors["more"] = at::zeros({1});
    if (what == std::string("shape")) tensors["a/large"] = at::zeros({300'002});
    if (what == std::string("dtype")) tensors["a/large"] = at::zeros({300'001}, at::kInt);
    if (what == std::string("gaps")) tensors["b/gaps"] = tensors["b/gaps"].contiguous();
    if (what == std::string("values")) tensors["b/gaps"] = tensors["b/gaps"] + 1;
    if (what == std::string("an element")) {
      tensors["a/large"] = tensors["a/large"].clone();
      tensors["a/large"][123'457] += 1;
    }
    CHECK_FALSE(job.copy(contents));
  }
  CHECK(names_in(folder.path) == std::vector<std::string>{"life", "lock"});
  CHECK(names_in(other.path).empty());
}

TEST_CASE("a rank that cannot write says so, and the chief names it; then the job goes on", "[checkpoint]") {
  const testing::Folder folder;
  Job job({folder.path, folder.path, folder.path});
  const int failing = GENERATE(0, 1);
  REQUIRE(job.copy());
  fs::create_directories(job.file_of(failing, folder.path));
  for (int rank = 0; rank < 3; ++rank) job.start(rank);
  CHECK(job.error_of(failing).find("-00000.safetensors") != std::string::npos);
  if (failing == 1) {
    const auto chiefs = job.error_of(0);
    CHECK(chiefs.find("worker-1-") != std::string::npos);
    CHECK(chiefs.find("could not write its part: ") != std::string::npos);
  }
  for (const auto& writer : job.writers) writer->wait();  // all else went well
  CHECK(names_in(folder.path) == std::vector<std::string>{"life", "lock"});
  REQUIRE(job.copy());
  for (int rank = 0; rank < 3; ++rank) job.start(rank);
  for (const auto& writer : job.writers) writer->wait();
  CHECK(are_equal(read_snapshot(job.writers.front()->written()), whole()));
}

TEST_CASE("the chief does not wait for a rank that is dead, nor for ever", "[checkpoint]") {
  const testing::Folder folder;
  Job job({folder.path, folder.path, folder.path});
  REQUIRE(job.copy());
  const bool is_dead = GENERATE(false, true);
  job.start(1);
  job.writers[1]->wait();                // its part is there: the chief takes the draft away
  if (is_dead) job.joints[2] = nullptr;  // which drops the lock, as the system does for a process
  job.start(0, is_dead ? milliseconds(600'000) : milliseconds(50));
  const auto chiefs = job.error_of(0);
  CHECK(chiefs.find("worker-2-") != std::string::npos);
  CHECK(chiefs.find(is_dead ? "died before it had written its part" : "has written nothing of its part") !=
        std::string::npos);
  CHECK(names_in(folder.path) == std::vector<std::string>{"life", "lock"});
}

TEST_CASE("a rank that still writes for another snapshot than this one fails", "[checkpoint]") {
  const testing::Folder folder;
  Job dead({folder.path, folder.path});
  REQUIRE(dead.copy());
  auto late = std::move(dead.joints[1]);
  dead.joints.clear();
  dead.writers[0] = nullptr;
  Job job({folder.path, folder.path});
  REQUIRE(job.copy());
  late->start({}, milliseconds(60'000));
  CHECK_THROWS_WITH(dead.writers[1]->wait(), ContainsSubstring("is gone"));
  for (int rank = 0; rank < 2; ++rank) job.start(rank);
  for (const auto& writer : job.writers) writer->wait();
  CHECK(are_equal(read_snapshot(job.writers.front()->written()), whole()));
}

TEST_CASE("a snapshot that the ranks gave up leaves nothing", "[checkpoint]") {
  const testing::Folder folder;
  Job job({folder.path, folder.path});
  REQUIRE(job.copy());
  job.joints.clear();
  CHECK(names_in(folder.path) == std::vector<std::string>{"life", "lock"});
}

TEST_CASE("what cannot be stored is refused before anything is copied", "[checkpoint]") {
  const testing::Folder folder;
  SnapshotWriter writer(folder.path, {});
  JointSnapshot joint(writer, 0, 2);
  const auto announced = joint.announce();
  const auto complex = at::zeros({2}, at::kComplexFloat);
  CHECK_THROWS_AS(joint.look({announced, ""}, {.chiefs = {{"a", complex}}}), InvalidArgument);
  CHECK_THROWS_AS(joint.look({announced, ""}, {.alike = {{"a", complex}}}), InvalidArgument);
  CHECK_THROWS_AS(joint.look({announced, ""}, {.divided = {Run::whole("a", complex)}}), InvalidArgument);
}
