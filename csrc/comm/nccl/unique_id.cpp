#include "comm/nccl/unique_id.h"

#include <algorithm>
#include <string>

#include "muster/error.h"
#include "net/rendezvous.h"

namespace muster::comm::nccl {

UniqueId share_id(const NcclApi& nccl, c10d::Store& store, int first_rank, Milliseconds timeout) {
  UniqueId id{};
  if (first_rank == 0) {
    const Status status = nccl.get_unique_id(&id);
    if (status != kSuccess) {
      throw CommError("NCCL could not make an id for the group: " + nccl.describe(status, nullptr) +
                      ". Check NCCL_SOCKET_IFNAME and run with NCCL_DEBUG=INFO");
    }
    net::set_text(store, "nccl_id", std::string(id.data(), id.size()));
    return id;
  }
  const std::string text = net::get_texts(store, {"nccl_id"}, {"rank 0"}, timeout)[0];
  if (text.size() != id.size()) {
    throw CommError("the store holds an NCCL id of " + std::to_string(text.size()) + " bytes instead of " +
                    std::to_string(id.size()) + "; give each group a store, or a PrefixStore, of its own");
  }
  std::copy(text.begin(), text.end(), id.begin());
  return id;
}

}  // namespace muster::comm::nccl
