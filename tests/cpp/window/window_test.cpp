// The suite of windows, for the ends that need no device.
#define MUSTER_WINDOW_ENDS HostEnd, ServerEnd
#include "cpp/window/window_suite.h"
