#include "core/control_group.h"

#include <fstream>
#include <limits>

#include "cpp/catch.h"
#include "support/folder.h"

using namespace muster;

namespace {

namespace fs = std::filesystem;

void write(const fs::path& file, const std::string& text) {
  fs::create_directories(file.parent_path());
  std::ofstream(file) << text;
}

}  // namespace

TEST_CASE("the least of the machine's memory and the control groups' limits", "[core]") {
  const testing::Folder folder;
  const auto proc = folder.path / "proc", cgroup = folder.path / "cgroup";
  const int64_t machine = memory_limit(proc, cgroup);
  CHECK(machine > 0);
  CHECK(machine < std::numeric_limits<int64_t>::max() / 2);
  SECTION("version 2") {
    write(proc / "self" / "cgroup", "0::/pods/one\n");
    write(cgroup / "pods" / "one" / "memory.max", "max\n");
    CHECK(memory_limit(proc, cgroup) == machine);
    write(cgroup / "pods" / "one" / "memory.max", "3000000\n");
    CHECK(memory_limit(proc, cgroup) == 3'000'000);
    write(cgroup / "pods" / "memory.max", "2000000\n");
    CHECK(memory_limit(proc, cgroup) == 2'000'000);
  }
  SECTION("version 1") {
    write(proc / "self" / "cgroup", "5:cpu,cpuacct:/\n4:memory:/docker/id\n");
    write(cgroup / "memory" / "docker" / "id" / "memory.limit_in_bytes", "9223372036854771712\n");  // none
    CHECK(memory_limit(proc, cgroup) == machine);
    write(cgroup / "memory" / "docker" / "id" / "memory.limit_in_bytes", "1000000\n");
    CHECK(memory_limit(proc, cgroup) == 1'000'000);
  }
  SECTION("a container that sees its own group as the root") {
    write(proc / "self" / "cgroup", "0::/\n");
    write(cgroup / "memory.max", "4000000\n");
    CHECK(memory_limit(proc, cgroup) == 4'000'000);
  }
}

TEST_CASE("the least of the control groups' limits of CPU time, and whose it is", "[core]") {
  const testing::Folder folder;
  const auto proc = folder.path / "proc", cgroup = folder.path / "cgroup";
  CHECK(!cpu_limit(proc, cgroup));
  SECTION("version 2") {
    write(proc / "self" / "cgroup", "0::/pods/one\n");
    write(cgroup / "pods" / "one" / "cpu.max", "max 100000\n");
    CHECK(!cpu_limit(proc, cgroup));
    write(cgroup / "pods" / "one" / "cpu.max", "250000 100000\n");
    const auto own = cpu_limit(proc, cgroup);
    REQUIRE(own);
    CHECK(own->cores == 2.5);
    write(cgroup / "pods" / "cpu.max", "50000 50000\n");
    const auto above = cpu_limit(proc, cgroup);
    REQUIRE(above);
    CHECK(above->cores == 1);
    CHECK(above->group != own->group);
  }
  SECTION("version 1") {
    write(proc / "self" / "cgroup", "5:cpu,cpuacct:/docker/id\n4:memory:/docker/id\n");
    write(cgroup / "cpu" / "docker" / "id" / "cpu.cfs_period_us", "100000\n");
    write(cgroup / "cpu" / "docker" / "id" / "cpu.cfs_quota_us", "-1\n");
    CHECK(!cpu_limit(proc, cgroup));
    write(cgroup / "cpu" / "docker" / "id" / "cpu.cfs_quota_us", "150000\n");
    REQUIRE(cpu_limit(proc, cgroup));
    CHECK(cpu_limit(proc, cgroup)->cores == 1.5);
  }
}
