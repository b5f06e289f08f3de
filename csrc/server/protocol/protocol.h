// The messages between workers and parameter servers; docs/parameter_server_protocol.md says who sends what when, and
// gives the bytes. One struct a message, whose kFields are its bytes; a list's bound is checked before it is read.
#pragma once

#include <exception>

#include "muster/error.h"
#include "net/channel.h"
#include "server/protocol/messages/batches.h"
#include "server/protocol/messages/parts.h"
#include "server/protocol/messages/rows.h"
#include "server/protocol/messages/session.h"
#include "server/protocol/messages/steps.h"
#include "server/protocol/messages/values.h"
#include "server/protocol/plan.h"

namespace muster::server {

using net::Bytes;
using net::Deadline;

/// A worker that another incarnation replaced, or that was declared dead.
class Fenced : public CommError {
 public:
  using CommError::CommError;
};

/// A job that may not begin: another one trains on the servers.
class Occupied : public CommError {
 public:
  using CommError::CommError;
};

/// What an error becomes on its way to a worker, and there again.
Refusal describe(const std::exception_ptr& error);
[[noreturn]] void raise(const Refusal& refusal);

}  // namespace muster::server
