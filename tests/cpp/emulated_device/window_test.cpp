// The suite of windows, for the end whose replicas work on streams.
#define MUSTER_WINDOW_ENDS DeviceEnd
#include "cpp/window/window_suite.h"
