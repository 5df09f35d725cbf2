// cuBLAS, which XLA asks for products of matrices: there is none here, and it is told so. Without this library its
// calls would fail too, but with no text for the error, which XLA would print.

#include "described.h"

#define NOT_SUPPORTED 15

int cublasCreate_v2(void **made) {
    *made = NULL;
    return NOT_SUPPORTED;
}
const char *cublasGetStatusString(int status) { return "refused by a library that only describes devices"; }
