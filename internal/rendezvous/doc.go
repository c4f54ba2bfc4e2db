// Package rendezvous connects the processes of a job, and tells each process when another one is lost.
//
// Rank 0 listens, and the other ranks connect to it. A connection begins with four messages:
//
//	rank to rank 0   hello: a random number, the number of ranks, the rank, its job, and a digest of what all ranks must have alike
//	rank 0 to rank   challenge: another random number
//	rank to rank 0   proof: an HMAC-SHA256 of both messages, whose key is the job's secret
//	rank 0 to rank   proof: the same with another label
//
// A job without a secret has the empty key. So a connection has to answer a challenge before rank 0 believes its
// hello:
//
//   - Rank 0 closes a connection that sends anything else, or nothing within the limit of silence.
//   - Rank 0 refuses a process with another secret or of another job, tells the process why, and goes on waiting.
//   - An impossible rank of the job (another number of ranks, a rank twice, another digest) ends the job. Both sides
//     report the difference: if digests differ, rank 0 sends its list, and the rank answers with the difference.
//
// Only a limited number of connections may be in these four messages at once. Above the limit rank 0 closes the
// oldest one; a rank whose connection was closed connects again. When all ranks are connected, rank 0 makes some
// bytes and sends them to all. The connections stay open: both ends send a heartbeat every second, and a process
// whose connection breaks, or that is silent for too long, is lost. A failing rank sends its reason, which rank 0
// sends to the others. So all ranks know the first failure and its rank.
//
// Ranks exchange data over the same connections: see [Session.Exchange].
//
// A message has a kind (1 byte), a length (2 bytes) and up to 2048 bytes, or 32768 bytes of data. Every wait has a time limit. Text from a
// peer is escaped before it becomes a part of an error. Nothing is encrypted.
package rendezvous
