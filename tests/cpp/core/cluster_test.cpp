#include "muster/cluster.h"

#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/address.h"
#include "core/launched.h"
#include "core/log.h"
#include "cpp/catch.h"
#include "muster/error.h"

namespace muster {
namespace {

using Variables = std::map<std::string, std::string>;

Cluster::Environment environment_of(const Variables& variables) {
  return [&](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
}

Cluster read(const Variables& variables) { return Cluster::from_env(environment_of(variables)); }

std::string refusal(const Variables& variables) {
  try {
    read(variables);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

Variables with(Variables base, const Variables& changes) {
  for (const auto& [name, value] : changes) base[name] = value;
  return base;
}

Variables without(Variables base, const std::vector<std::string>& names) {
  for (const auto& name : names) base.erase(name);
  return base;
}

const Variables kTorchrun = {{"RANK", "2"},
                             {"WORLD_SIZE", "4"},
                             {"LOCAL_RANK", "0"},
                             {"LOCAL_WORLD_SIZE", "2"},
                             {"MASTER_ADDR", "node7"},
                             {"MASTER_PORT", "29501"},
                             {"TORCHELASTIC_RUN_ID", "x"}};
const Variables kSlurm = {{"SLURM_PROCID", "3"},
                          {"SLURM_NTASKS", "4"},
                          {"SLURM_LOCALID", "1"},
                          {"SLURM_STEP_ID", "0"},
                          {"SLURM_JOB_ID", "123"},
                          {"SLURM_STEP_NODELIST", "node[003-006,9],gpu1"},
                          {"SLURM_JOB_NODELIST", "other[1-9]"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                            {"PMIX_NAMESPACE", "prterun-host-77@1"}};

TEST_CASE("without a launcher: a world of one, said in one line", "[cluster]") {
  int lines = 0;
  set_log_sink([&](LogLevel level, const std::string& message) {
    ++lines;
    CHECK(level == LogLevel::info);
    CHECK_THAT(message, ContainsSubstring("world of one"));
  });
  CHECK(read({}) == Cluster{});
  set_log_sink({});
  CHECK(lines == 1);
  CHECK(read({{"RANK", ""}, {"WORLD_SIZE", ""}}) == Cluster{});
}

TEST_CASE("torchrun", "[cluster]") {
  Cluster cluster = read(kTorchrun);
  CHECK(cluster.rank == 2);
  CHECK(cluster.num_workers == 4);
  CHECK(cluster.local_rank == 0);
  CHECK(cluster.address == "node7:29501");
  CHECK(cluster.launcher == "torchrun");
  CHECK_FALSE(cluster.store_is_hosted);
  CHECK(read(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}})).store_is_hosted);
  CHECK_FALSE(read(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}})).store_is_hosted);
  CHECK(read(with(kTorchrun, {{"MASTER_ADDR", "fe80::1"}})).address == "[fe80::1]:29501");
  CHECK_THAT(refusal(with(kTorchrun, {{"MASTER_ADDR", "tcp://a"}})),
             ContainsSubstring("MASTER_ADDR=tcp://a is no host"));
}

TEST_CASE("variables set by hand", "[cluster]") {
  CHECK(read(without(kTorchrun, {"LOCAL_RANK", "LOCAL_WORLD_SIZE"})).local_rank == 0);
  const Cluster one =
      read({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}, {"MASTER_ADDR", "x"}, {"MASTER_PORT", "1"}});
  CHECK(one.num_workers == 1);
  CHECK(one.address.empty());
  CHECK(read({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "2"}, {"MASTER_PORT", "29500"}}).address ==
        "127.0.0.1:29500");
}

TEST_CASE("slurm", "[cluster]") {
  const Cluster cluster = read(kSlurm);
  CHECK(cluster.rank == 3);
  CHECK(cluster.num_workers == 4);
  CHECK(cluster.local_rank == 1);
  CHECK(cluster.launcher == "slurm");
  const Address address = parse_address(cluster.address);
  CHECK(address.host == "node003");
  CHECK(address.port >= 20000);
  CHECK(address.port < 30000);
  CHECK(read(with(kSlurm, {{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}})).address == cluster.address);
  CHECK(read(with(kSlurm, {{"SLURM_JOB_ID", "124"}})).address != cluster.address);
  CHECK(read(with(kSlurm, {{"SLURM_STEP_ID", "1"}})).address != cluster.address);
  CHECK(read(with(kSlurm, {{"MASTER_ADDR", "a"}, {"MASTER_PORT", "5"}})).address == "a:5");
  CHECK(read(with(kSlurm, {{"MASTER_PORT", "5"}})).address == "node003:5");
  CHECK(read(with(kSlurm, {{"SLURM_NTASKS", "64"}, {"SLURM_STEP_NUM_TASKS", "4"}})).num_workers == 4);
  CHECK(read(with(without(kSlurm, {"SLURM_STEP_ID"}), {{"SLURM_STEPID", "0"}})).launcher == "slurm");
}

TEST_CASE("the first node of Slurm's lists", "[cluster]") {
  const auto host = [](const char* nodes) {
    return parse_address(read(with(kSlurm, {{"SLURM_STEP_NODELIST", nodes}})).address).host;
  };
  CHECK(host("node1") == "node1");
  CHECK(host("node1,node2") == "node1");
  CHECK(host("node[9,003-006]") == "node9");
  CHECK(host("gpu1,node[1-2]") == "gpu1");
  CHECK(host("rack[1-2]n[01-16]-ib,x") == "rack1n01-ib");
  CHECK(host("a-b[7]") == "a-b7");
  CHECK(parse_address(read(without(kSlurm, {"SLURM_STEP_NODELIST"})).address).host == "other1");
  for (const char* bad : {"node[", "node[1-2", "node[]", "node]1", ",a"}) {
    CHECK_THAT(refusal(with(kSlurm, {{"SLURM_STEP_NODELIST", bad}})),
               ContainsSubstring(bad) && ContainsSubstring("MASTER_ADDR"));
  }
}

TEST_CASE("the shells of sbatch and salloc are no tasks", "[cluster]") {
  const Variables shell = with(kSlurm, {{"SLURM_PROCID", "0"}});
  CHECK(read(without(shell, {"SLURM_STEP_ID"})).launcher == "none");
  CHECK(read(without(shell, {"SLURM_PROCID"})).launcher == "none");
  for (const char* step : {"4294967290", "4294967291"}) {
    CHECK(read(with(shell, {{"SLURM_STEP_ID", step}})).launcher == "none");
  }
}

TEST_CASE("open mpi", "[cluster]") {
  const Cluster cluster = read(kOpenMpi);
  CHECK(cluster.rank == 1);
  CHECK(cluster.num_workers == 2);
  CHECK(cluster.local_rank == 1);
  CHECK(cluster.launcher == "openmpi");
  CHECK(parse_address(cluster.address).host == "127.0.0.1");
  CHECK(read(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}})).address ==
        cluster.address);
  CHECK(read(with(kOpenMpi, {{"PMIX_NAMESPACE", "prterun-host-78@1"}})).address != cluster.address);
  const Variables version4 = with(without(kOpenMpi, {"PMIX_NAMESPACE"}), {{"OMPI_MCA_ess_base_jobid", "81"}});
  CHECK(parse_address(read(version4).address).host == "127.0.0.1");
  CHECK(read(with(kOpenMpi, {{"MASTER_ADDR", "a"}, {"MASTER_PORT", "5"}})).address == "a:5");
  CHECK_THAT(refusal(without(kOpenMpi, {"PMIX_NAMESPACE"})), ContainsSubstring("MASTER_PORT"));
  const Variables two_hosts = with(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", "4"}});
  CHECK_THAT(refusal(two_hosts), ContainsSubstring("MASTER_ADDR") && ContainsSubstring("OMPI_COMM_WORLD_SIZE=4"));
  CHECK(parse_address(read(with(two_hosts, {{"SLURM_JOB_NODELIST", "n[1-2]"}, {"SLURM_JOB_ID", "5"}})).address).host ==
        "n1");
}

TEST_CASE("mpich and intel mpi", "[cluster]") {
  const Variables hydra = {{"PMI_RANK", "1"},
                           {"PMI_SIZE", "2"},
                           {"MPI_LOCALRANKID", "1"},
                           {"MPI_LOCALNRANKS", "2"},
                           {"MASTER_PORT", "29500"}};
  const Cluster cluster = read(hydra);
  CHECK(cluster.rank == 1);
  CHECK(cluster.num_workers == 2);
  CHECK(cluster.local_rank == 1);
  CHECK(cluster.launcher == "mpich");
  CHECK(cluster.address == "127.0.0.1:29500");
  CHECK_THAT(refusal(without(hydra, {"MASTER_PORT"})), ContainsSubstring("MASTER_PORT"));
  CHECK_THAT(refusal(without(hydra, {"PMI_SIZE"})), ContainsSubstring("PMI_RANK is set but PMI_SIZE is not"));
  const Variables two_hosts = with(hydra, {{"PMI_SIZE", "4"}});
  CHECK_THAT(refusal(two_hosts), ContainsSubstring("MASTER_ADDR") && ContainsSubstring("PMI_SIZE=4"));
  CHECK(read(with(two_hosts, {{"MASTER_ADDR", "a"}})).address == "a:29500");
  // As srun --mpi=pmi2 has them, and the proxies that srun starts for mpiexec.
  CHECK(read(with(kSlurm, {{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}})).launcher == "slurm");
  CHECK(read(with(with(kSlurm, {{"SLURM_NTASKS", "1"}, {"SLURM_PROCID", "0"}}), hydra)).launcher == "mpich");
}

TEST_CASE("a launcher that is not known leaves each process alone, and a warning says so", "[cluster]") {
  std::vector<std::string> warnings;
  set_log_sink([&](LogLevel level, const std::string& message) {
    if (level == LogLevel::warning) warnings.push_back(message);
  });
  CHECK(read({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}).num_workers == 1);
  CHECK(read({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}).num_workers == 1);
  set_log_sink({});
  REQUIRE(warnings.size() == 1);
  CHECK_THAT(warnings.front(), ContainsSubstring("PMI_SIZE=2 tells of a launcher that is not known"));
}

TEST_CASE("launchers inside each other", "[cluster]") {
  SECTION("torchrun under srun") {
    const Cluster cluster = read(with(kSlurm, kTorchrun));
    CHECK(cluster.launcher == "torchrun");
    CHECK(cluster.rank == 2);
  }
  SECTION("mpirun whose daemons srun started") {
    const Cluster cluster = read(with(with(kSlurm, {{"SLURM_NTASKS", "1"}, {"SLURM_PROCID", "0"}}), kOpenMpi));
    CHECK(cluster.launcher == "openmpi");
    CHECK(cluster.rank == 1);
  }
  SECTION("a script that passes the launcher's numbers on") {
    CHECK(read(with(kSlurm, {{"RANK", "3"}, {"WORLD_SIZE", "4"}})).launcher == "slurm");
    CHECK(read(with(kOpenMpi, {{"WORLD_SIZE", "2"}})).launcher == "openmpi");
  }
  SECTION("a shell of sbatch leaves variables set by hand alone") {
    CHECK(read(with(without(kSlurm, {"SLURM_STEP_ID"}), without(kTorchrun, {"LOCAL_RANK"}))).rank == 2);
  }
}

TEST_CASE("contradictions name the variables and their values", "[cluster]") {
  CHECK_THAT(refusal(with(kSlurm, {{"RANK", "1"}, {"WORLD_SIZE", "4"}})),
             ContainsSubstring("RANK=1") && ContainsSubstring("SLURM_PROCID=3") && ContainsSubstring("unset RANK"));
  CHECK_THAT(refusal(with(kSlurm, {{"WORLD_SIZE", "2"}})),
             ContainsSubstring("WORLD_SIZE=2") && ContainsSubstring("SLURM_NTASKS=4"));
  CHECK_THAT(refusal(with(kOpenMpi, {{"LOCAL_RANK", "0"}})), ContainsSubstring("LOCAL_RANK=0"));
  CHECK_THAT(refusal(with(kTorchrun, {{"RANK", "4"}})),
             ContainsSubstring("RANK=4") && ContainsSubstring("WORLD_SIZE=4"));
  CHECK_THAT(refusal(with(kTorchrun, {{"RANK", "-1"}})), ContainsSubstring("RANK=-1"));
  CHECK_THAT(refusal(with(kTorchrun, {{"WORLD_SIZE", "0"}})), ContainsSubstring("WORLD_SIZE=0"));
  CHECK_THAT(refusal(with(kSlurm, {{"SLURM_PROCID", "9"}})), ContainsSubstring("SLURM_PROCID=9"));
}

TEST_CASE("incomplete and malformed variables are refused", "[cluster]") {
  CHECK_THAT(refusal({{"RANK", "0"}}), ContainsSubstring("RANK") && ContainsSubstring("WORLD_SIZE"));
  CHECK_THAT(refusal({{"WORLD_SIZE", "2"}}), ContainsSubstring("RANK") && ContainsSubstring("WORLD_SIZE"));
  CHECK_THAT(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}}),
             ContainsSubstring("MASTER_ADDR") && ContainsSubstring("MASTER_PORT"));
  CHECK_THAT(refusal({{"MASTER_ADDR", "node1"}}), ContainsSubstring("MASTER_ADDR=node1") && ContainsSubstring("RANK"));
  CHECK_THAT(refusal(without(kTorchrun, {"MASTER_PORT"})), ContainsSubstring("MASTER_PORT"));
  CHECK_THAT(refusal(without(kSlurm, {"SLURM_NTASKS"})), ContainsSubstring("SLURM_NTASKS"));
  CHECK_THAT(refusal(without(kSlurm, {"SLURM_LOCALID"})), ContainsSubstring("SLURM_LOCALID"));
  CHECK_THAT(refusal(without(kSlurm, {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"})), ContainsSubstring("MASTER_ADDR"));
  CHECK_THAT(refusal(without(kSlurm, {"SLURM_JOB_ID"})), ContainsSubstring("MASTER_PORT"));
  CHECK_THAT(refusal(without(kOpenMpi, {"OMPI_COMM_WORLD_RANK"})), ContainsSubstring("OMPI_COMM_WORLD_RANK"));
  for (const char* bad : {"one", "1x", "1.0", " 1", "99999999999"}) {
    CHECK_THAT(refusal(with(kTorchrun, {{"RANK", bad}})), ContainsSubstring(std::string("RANK=") + bad));
  }
  CHECK_THAT(refusal(with(kTorchrun, {{"LOCAL_RANK", "-1"}})), ContainsSubstring("local_rank"));
  for (const char* bad : {"0", "65536", "http", "-5"}) {
    CHECK_THAT(refusal(with(kTorchrun, {{"MASTER_PORT", bad}})), ContainsSubstring(std::string("MASTER_PORT=") + bad));
  }
}

TEST_CASE("validate", "[cluster]") {
  Cluster good;
  good.num_workers = 2;
  good.rank = 1;
  for (const char* address : {"localhost:29500", "10.0.0.1:1", "[::1]:29500", "node-1.example:65535"}) {
    good.address = address;
    CHECK_NOTHROW(good.validate());
  }
  CHECK_NOTHROW(Cluster{}.validate());
  for (const char* address :
       {"", "node", "node:", ":29500", "::1:29500", "[::1]", "[]:5", "node:0", "node:70000", "node:x", "node:+5"}) {
    INFO(address);
    good.address = address;
    CHECK_THROWS_AS(good.validate(), InvalidArgument);
  }
  good.address = "a:1";
  for (auto [rank, size, local] : {std::tuple{2, 2, 0}, {-1, 2, 0}, {0, 0, 0}, {0, 2, -1}}) {
    Cluster bad = good;
    bad.rank = rank;
    bad.num_workers = size;
    bad.local_rank = local;
    CHECK_THROWS_AS(bad.validate(), InvalidArgument);
  }
}

TEST_CASE("parameter servers, whatever the launcher", "[cluster]") {
  const std::vector<std::string> servers = {"localhost:5000", "node-1:5000", "[::1]:5001"};
  const Variables named = {{"MUSTER_SERVERS", "localhost:5000,node-1:5000,[::1]:5001"}};
  for (const auto& launcher : {Variables{}, kTorchrun, kSlurm, kOpenMpi}) {
    Cluster expected = read(launcher);
    CHECK(expected.servers.empty());
    expected.servers = servers;
    CHECK(read(with(launcher, named)) == expected);
  }
  CHECK(read({{"MUSTER_SERVERS", "a:1"}}).servers == std::vector<std::string>{"a:1"});
  CHECK(read({{"MUSTER_SERVERS", ""}}).servers.empty());
  for (const auto& launcher : {Variables{}, kTorchrun}) {
    for (const char* bad : {"a", "a:1,", ",a:1", "a:1,,b:1", "a:1;b:1", "a:0", "::1:5"}) {
      INFO(bad);
      CHECK_THAT(refusal(with(launcher, {{"MUSTER_SERVERS", bad}})), ContainsSubstring("MUSTER_SERVERS"));
    }
    CHECK_THAT(refusal(with(launcher, {{"MUSTER_SERVERS", "a:1,b:1,a:1"}})), ContainsSubstring("'a:1' is named twice"));
  }
  Cluster cluster;
  cluster.servers = {"[::1]:5", "localhost:5"};
  CHECK_NOTHROW(cluster.validate());
  cluster.servers.emplace_back("[::1]:5");
  CHECK_THROWS_AS(cluster.validate(), InvalidArgument);
}

TEST_CASE("what a launcher has started is known to those who do not ask, as far as its variables say", "[cluster]") {
  const auto launched = find_launched(environment_of(kTorchrun));
  REQUIRE(launched);
  CHECK(launched->launcher == "torchrun");
  CHECK(launched->rank == 2);
  CHECK(launched->num_workers == 4);
  CHECK(find_launched(environment_of(kOpenMpi))->num_workers == 2);
  CHECK(!find_launched(environment_of({})));
  const auto incomplete = without(kTorchrun, {"WORLD_SIZE"});
  CHECK(!find_launched(environment_of(incomplete)));
  const auto impossible = with(kTorchrun, {{"RANK", "4"}});
  CHECK(!find_launched(environment_of(impossible)));
}

TEST_CASE("addresses", "[cluster]") {
  CHECK(parse_address("[::1]:29500") == Address{"::1", 29500});
  CHECK(parse_address("node1:5") == Address{"node1", 5});
  CHECK(to_string(Address{"::1", 29500}) == "[::1]:29500");
  CHECK(to_string(Address{"node1", 5}) == "node1:5");
}

}  // namespace
}  // namespace muster
