// Package rendezvous connects the processes of a job, and tells each of them when another one is lost.
//
// Rank 0 listens, and the other ranks connect to it. A connection begins with four messages:
//
//	rank to rank 0   hello: a random number, the number of ranks, the rank, its job, and a digest of what all ranks must have alike
//	rank 0 to rank   challenge: another random number
//	rank to rank 0   proof: an HMAC-SHA256 of both messages, whose key is the job's secret
//	rank 0 to rank   proof: the same with another label
//
// A job without a secret has the empty key. So a connection has to answer a challenge before rank 0 believes
// what its hello says:
//
//   - Rank 0 closes a connection that sends anything else, or nothing within the limit of silence.
//   - Rank 0 turns away a process with another secret or of another job. It tells that process why, and goes on waiting.
//   - A rank of the job that can't be one (another number of ranks, a rank twice, another digest) ends the
//     job. Both sides then say what differs: where digests do, rank 0 sends its list, and the rank answers with the difference.
//
// Only a limited number of connections may be in these four messages at once. Where there are more, rank 0 closes the
// oldest one, and a rank that is closed so connects again. When all ranks have come, rank 0 gives them some bytes that it
// has made. The connections stay: both ends send a beat every second, and a process whose connection breaks, or that is
// silent for too long, is lost. A rank that fails says why, and rank 0 tells the others. So all ranks know
// the first failure, and which rank's it is.
//
// A message has a kind (1 byte), a length (2 bytes) and up to 2048 bytes. Every wait has a time limit. Text that a
// peer has sent is escaped before it becomes a part of an error. Nothing is encrypted.
package rendezvous
