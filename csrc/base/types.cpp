#include "base/types.hpp"

namespace dpt {

size_t size_of(DataType dtype) {
  switch (dtype) {
    case DPT_BOOL:
    case DPT_INT8:
    case DPT_UINT8:
    case DPT_OTHER:
      return 1;
    case DPT_INT16:
    case DPT_FLOAT16:
    case DPT_BFLOAT16:
      return 2;
    case DPT_INT32:
    case DPT_FLOAT32:
      return 4;
    case DPT_INT64:
    case DPT_FLOAT64:
    case DPT_COMPLEX64:
      return 8;
    case DPT_COMPLEX128:
      return 16;
  }
  return 0;
}

const char* name_of(DataType dtype) {
  switch (dtype) {
    case DPT_BOOL:
      return "bool";
    case DPT_INT8:
      return "int8";
    case DPT_UINT8:
      return "uint8";
    case DPT_INT16:
      return "int16";
    case DPT_INT32:
      return "int32";
    case DPT_INT64:
      return "int64";
    case DPT_FLOAT16:
      return "float16";
    case DPT_BFLOAT16:
      return "bfloat16";
    case DPT_FLOAT32:
      return "float32";
    case DPT_FLOAT64:
      return "float64";
    case DPT_COMPLEX64:
      return "complex64";
    case DPT_COMPLEX128:
      return "complex128";
    case DPT_OTHER:
      return "bytes of another dtype";
  }
  return "unknown dtype";
}

const char* name_of(ReduceOp op) {
  switch (op) {
    case DPT_SUM:
      return "sum";
    case DPT_AVG:
      return "avg";
    case DPT_PRODUCT:
      return "product";
    case DPT_MIN:
      return "min";
    case DPT_MAX:
      return "max";
    case DPT_PREMUL_SUM:
      return "premul_sum";
    case DPT_BAND:
      return "band";
    case DPT_BOR:
      return "bor";
    case DPT_BXOR:
      return "bxor";
    case DPT_NO_REDUCE:
      return "none";
  }
  return "unknown reduce op";
}

const char* name_of(Collective collective) {
  switch (collective) {
    case DPT_ALL_REDUCE:
      return "all_reduce";
    case DPT_ALL_GATHER:
      return "all_gather";
    case DPT_REDUCE_SCATTER:
      return "reduce_scatter";
    case DPT_BROADCAST:
      return "broadcast";
    case DPT_BARRIER:
      return "barrier";
    case DPT_REDUCE:
      return "reduce";
    case DPT_GATHER:
      return "gather";
    case DPT_SCATTER:
      return "scatter";
    case DPT_ALL_TO_ALL:
      return "all_to_all";
    case DPT_SEND:
      return "send";
    case DPT_RECV:
      return "recv";
  }
  return "unknown collective";
}

}  // namespace dpt
