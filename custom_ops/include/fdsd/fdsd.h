#pragma once
// Every op of the library.
#include "fdsd/activation.h"
#include "fdsd/attention.h"
#include "fdsd/batch.h"
#include "fdsd/cast.h"
#include "fdsd/linear.h"
#include "fdsd/moe.h"
#include "fdsd/mtp.h"
#include "fdsd/norm.h"
#include "fdsd/runtime.h"
#include "fdsd/sampling.h"
