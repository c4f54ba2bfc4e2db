// Package rendezvous has the processes of a job meet, and tells each when another one is lost.
//
// Rank 0 listens, and the others connect to it; when all have come it gives them some bytes
// that it has made. The connections stay: both ends send a beat every second, and a process
// whose connection breaks, or that is silent for too long, is lost. Whoever fails says so, and
// rank 0 hands it on. So all ranks know the first failure, and whose it is.
//
// A message is its kind, the length of what follows in two bytes, and that: 2048 bytes at most.
// Every wait has a time limit. Who sends what is no message of this protocol is cut off, and
// nobody else notices. There is no secrecy: the network is the job's.
package rendezvous
