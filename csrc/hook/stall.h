/* stall.h: can a stream of this process stand still for a reason that is not the device's work?
 *
 * A stream behind cuStreamWaitValue, a semaphore or a host function goes on when somebody else does something, and that may be
 * a thread of ours that waits for the gate, or for its stream. Nothing may then wait for such a stream without end. */
#ifndef CGPU_STALL_H
#define CGPU_STALL_H
#include <stdbool.h>

/* A call was made after which a stream may wait for the host or for another process. Sticky. */
void stall_possible_from_now(void);
bool stall_was_possible(void);
/* That, or host functions are queued and have not returned. */
bool stall_is_possible(void);
/* A capture is active in this process. */
bool capture_is_active(void);
#endif
