#include <ATen/ops/ones.h>

#include "comm/communicator.h"
#include "cpp/catch.h"
#include "muster/error.h"

using namespace muster;
using namespace muster::comm;

TEST_CASE("what is broadcast on the device goes over the direct group, all else over the host's", "[comm][staged]") {
  const CommunicatorPtr host = make_single();
  const CommunicatorPtr direct = make_single();
  const CommunicatorPtr staged = make_staged(host, c10::Device(c10::kCPU), direct);
  const at::Tensor tensor = at::ones({3});
  staged->broadcast(tensor, 0).wait();
  direct->abort("the direct group ends");
  CHECK_THROWS_WITH(staged->broadcast(tensor, 0), ContainsSubstring("the direct group ends"));
  staged->all_reduce(tensor, ReduceOp::sum).wait();
  staged->all_gather(tensor).wait();
  staged->barrier().wait();
}

TEST_CASE("without a direct group what is broadcast goes over the host's", "[comm][staged]") {
  const CommunicatorPtr host = make_single();
  const CommunicatorPtr staged = make_staged(host, c10::Device(c10::kCPU));
  const at::Tensor tensor = at::ones({3});
  staged->broadcast(tensor, 0).wait();
  host->abort("the host's group ends");
  CHECK_THROWS_WITH(staged->broadcast(tensor, 0), ContainsSubstring("the host's group ends"));
}
