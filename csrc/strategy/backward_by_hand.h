// Gradients of a backward that the user's loop calls itself.
#pragma once

#include "strategy/session.h"

namespace muster {

/// Collective over workers (one replica a worker): replaces `.grad` of a module's trainable parameters by its mean over
/// workers; a parameter without a gradient anywhere keeps none. Throws InvalidArgument on parameter servers, with a
/// loss scale, and for several replicas in a process.
void average_gradients(Session& session, int module);

}  // namespace muster
