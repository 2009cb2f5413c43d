/* The agreement of csrc/comm/rendezvous.cpp: at each visit all ranks are told that all came, or none
 * is. A rank may lose patience, or decline, at any moment; once one has, nobody counts any more.
 */
#define N 3
#define VISITS 2
#define UNKNOWN 0
#define TOGETHER 1
#define APART 2

byte count;
bool withdrawn;
byte verdict[VISITS + 1];

inline tell(answer) {
  atomic {
    assert(verdict[visit] == UNKNOWN || verdict[visit] == answer);
    verdict[visit] = answer
  }
}

proctype rank() {
  byte visit = 1, seen;
  bool gone;
  do
  :: visit > VISITS -> break
  :: else ->
     if
     :: withdrawn = true; tell(APART); goto next  /* it declines */
     :: skip
     fi;
     atomic { if :: withdrawn -> gone = true :: else -> count++; gone = false fi };
     if :: gone -> tell(APART); goto next :: else fi;
     do
     :: atomic { seen = count; gone = withdrawn };
        if
        :: seen >= visit * N -> tell(TOGETHER); goto next
        :: else
        fi;
        if :: gone -> tell(APART); goto next :: else fi;
        if
        :: skip
        :: /* its patience is over: only what it has seen may be withdrawn from */
#ifdef FAULT_WITHDRAWS_BLINDLY
           withdrawn = true; tell(APART); goto next
#else
           atomic {
             if
             :: count == seen && !withdrawn -> withdrawn = true; gone = true
             :: else -> gone = false
             fi
           };
           if :: gone -> tell(APART); goto next :: else fi
#endif
        fi
     od;
next:
     visit++
  od
}

init {
  byte r = 0;
  atomic { do :: r == N -> break :: else -> run rank(); r++ od }
}
