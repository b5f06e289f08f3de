// Everything: torch and all of Muster. A file that compiles faster includes the strategy's header (muster/mirrored.h,
// muster/multi_worker.h) and what it needs of torch.
#pragma once

#include <torch/torch.h>

#include "muster/balance.h"
#include "muster/checkpoints.h"
#include "muster/cluster.h"
#include "muster/error.h"
#include "muster/loader.h"
#include "muster/loss_scaler.h"
#include "muster/mirrored.h"
#include "muster/multi_worker.h"
#include "muster/optim.h"
#include "muster/options.h"
#include "muster/parameter_server.h"
#include "muster/parameters_after.h"
#include "muster/partitioner.h"
#include "muster/per_replica.h"
#include "muster/precision.h"
#include "muster/reduce_op.h"
#include "muster/replicated.h"
#include "muster/sharded_embedding.h"
#include "muster/step.h"
#include "muster/strategy.h"
#include "muster/version.h"
