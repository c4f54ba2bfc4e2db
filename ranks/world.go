package ranks

import (
	"cmp"
	"fmt"
	"io"
	"net"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/internal/rendezvous"
)

// World says which of the processes of a job this process is.
type World struct {
	Rank      int    // number of this process among all, from 0
	Size      int    // number of processes
	LocalRank int    // number of this process on its host, from 0: the ordinal of its GPU
	Address   string // host:port at which rank 0 listens

	// Job is the name of the job, in up to 128 bytes. Rank 0 refuses a process with another Job, and goes on waiting.
	// Without a Job, a rank of another job that connects to Address ends both jobs.
	Job string

	// Timeout limits each wait for the other ranks: in Join, at a barrier and in a collective. 0 is five minutes.
	Timeout time.Duration
}

// The variables of [Environment].
const (
	rankVariable    = "RANK"
	sizeVariable    = "WORLD_SIZE"
	localVariable   = "LOCAL_RANK"
	addressVariable = "MASTER_ADDR"
	portVariable    = "MASTER_PORT"
	agentVariable   = "TORCHELASTIC_USE_AGENT_STORE"
	ownPortVariable = "LEANATTENTION_MASTER_PORT"
	timeoutVariable = "LEANATTENTION_RANKS_TIMEOUT"
	jobVariable     = "LEANATTENTION_JOB"
	runVariable     = "TORCHELASTIC_RUN_ID"
	secretVariable  = "LEANATTENTION_SECRET"
	secretFile      = "LEANATTENTION_SECRET_FILE"
)

const (
	mostRanks      = 1024
	defaultTimeout = 5 * time.Minute
	leastSecret    = 16      // bytes
	mostSecret     = 1 << 12 // bytes
)

// Environment reads the World from environment variables. torchrun and the training operators of Kubernetes set them; under
// Slurm the job script sets the first three from SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID.
//
//   - RANK, WORLD_SIZE: Rank and Size. Without both, this process is rank 0 of 1.
//   - LOCAL_RANK: LocalRank, 0 by default.
//   - MASTER_ADDR, MASTER_PORT: Address. Under torchrun (TORCHELASTIC_USE_AGENT_STORE is True) the agent listens at
//     MASTER_PORT, and the port is MASTER_PORT+1. LEANATTENTION_MASTER_PORT sets the port in every case.
//   - LEANATTENTION_RANKS_TIMEOUT: Timeout, such as "90s".
//   - LEANATTENTION_JOB, or else TORCHELASTIC_RUN_ID: Job.
//
// Errors: ErrOption, which names the variable and its value.
func Environment() (World, error) { return environment(os.LookupEnv) }

func environment(lookup func(string) (string, bool)) (w World, err error) {
	_, hasRank := lookup(rankVariable)
	_, hasSize := lookup(sizeVariable)
	if !hasRank && !hasSize {
		return World{Size: 1}, nil
	}
	note := func(e error) {
		if err == nil {
			err = e
		}
	}
	number := func(name string, least, most int) int {
		text, ok := lookup(name)
		if !ok {
			note(variableError(name, "is not set, and others say that this is one of several processes"))
			return least
		}
		n, e := strconv.Atoi(text)
		if e != nil || strconv.Itoa(n) != text || n < least || n > most {
			note(variableError(name, "is %q, want a number from %d to %d", text, least, most))
			return least
		}
		return n
	}
	w.Size = number(sizeVariable, 1, mostRanks)
	w.Rank = number(rankVariable, 0, max(w.Size-1, 0))
	if _, ok := lookup(localVariable); ok {
		w.LocalRank = number(localVariable, 0, w.Rank)
	}
	if text, ok := lookup(timeoutVariable); ok {
		if w.Timeout, _ = time.ParseDuration(text); w.Timeout <= 0 {
			note(variableError(timeoutVariable, "is %q, want a time such as 90s", text))
		}
	}
	if err != nil || w.Size == 1 {
		return w, err
	}
	for _, name := range []string{jobVariable, runVariable} {
		if job, ok := lookup(name); ok {
			if w.Job = job; len(job) > rendezvous.MostJob {
				note(variableError(name, "has %d bytes, and a job's name has up to %d", len(job), rendezvous.MostJob))
			}
			break
		}
	}
	host, ok := lookup(addressVariable)
	switch {
	case !ok:
		note(variableError(addressVariable, "is not set, and there are %d processes", w.Size))
	case host == "" || strings.ContainsAny(host, " \t\n/"):
		note(variableError(addressVariable, "is %q, want the name or address of rank 0's host", host))
	}
	var port int
	if _, ok := lookup(ownPortVariable); ok {
		port = number(ownPortVariable, 1, 65535)
	} else if agent, _ := lookup(agentVariable); agent == "True" {
		port = number(portVariable, 1, 65534) + 1
	} else {
		port = number(portVariable, 1, 65535)
	}
	w.Address = net.JoinHostPort(strings.Trim(host, "[]"), strconv.Itoa(port))
	return w, err
}

func variableError(name, format string, args ...any) error {
	return errorf("Environment", errs.ErrOption, "%s %s", name, fmt.Sprintf(format, args...))
}

func errorf(op string, kind error, format string, args ...any) error {
	return fmt.Errorf("ranks: %s: %s: %w", op, fmt.Sprintf(format, args...), kind)
}

// check is for worlds that are not from the environment.
func (w World) check(op string) error {
	switch {
	case w.Size < 1 || w.Size > mostRanks:
		return errorf(op, errs.ErrOption, "size %d, want 1 to %d", w.Size, mostRanks)
	case w.Rank < 0 || w.Rank >= w.Size:
		return errorf(op, errs.ErrOption, "rank %d of %d", w.Rank, w.Size)
	case w.LocalRank < 0:
		return errorf(op, errs.ErrOption, "local rank %d", w.LocalRank)
	case len(w.Job) > rendezvous.MostJob:
		return errorf(op, errs.ErrOption, "a job's name of %d bytes, want up to %d", len(w.Job), rendezvous.MostJob)
	case w.Timeout < 0:
		return errorf(op, errs.ErrOption, "timeout %v", w.Timeout)
	}
	if w.Size > 1 {
		if _, _, err := net.SplitHostPort(w.Address); err != nil {
			return errorf(op, errs.ErrOption, "address %q: %v", w.Address, err)
		}
	}
	return nil
}

// secret is what the ranks of a job know, and nobody else: LEANATTENTION_SECRET, or the content of the file that
// LEANATTENTION_SECRET_FILE names. Errors have no part of it.
func secret(lookup func(string) (string, bool)) ([]byte, error) {
	text, set := lookup(secretVariable)
	name, inFile := lookup(secretFile)
	from := secretVariable
	switch {
	case set && inFile:
		return nil, errorf("Join", errs.ErrOption, "%s and %s are both set", secretVariable, secretFile)
	case inFile:
		f, err := os.Open(name)
		if err != nil {
			return nil, errorf("Join", errs.ErrOption, "%s: %v", secretFile, err)
		}
		defer f.Close()
		data, err := io.ReadAll(io.LimitReader(f, mostSecret+2))
		if err != nil {
			return nil, errorf("Join", errs.ErrOption, "%s: %v", secretFile, err)
		}
		text, from = strings.TrimSuffix(strings.TrimSuffix(string(data), "\n"), "\r"), secretFile
	case !set:
		return nil, nil
	}
	if len(text) < leastSecret || len(text) > mostSecret {
		return nil, errorf("Join", errs.ErrOption, "%s: a secret of %d bytes, want %d to %d, such as those of: openssl rand -hex 32", from, len(text), leastSecret, mostSecret)
	}
	return []byte(text), nil
}

// version is that of this module, as far as the program knows it.
func version() string {
	const path = "gorgonia.org/leanattention"
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "of an unknown version"
	}
	for _, m := range append(info.Deps, &info.Main) {
		if m.Path == path {
			if m.Replace != nil {
				m = m.Replace
			}
			return cmp.Or(m.Version, "(devel)")
		}
	}
	return "of an unknown version"
}

// OpenGPU opens the GPU of this rank: the GPU with the ordinal LocalRank, or the only GPU that the process sees, since
// launchers may show each process its own. A rank with several GPUs calls [device.Open].
//
// Errors: ErrOption for an invalid World, and those of [device.Open].
func (w World) OpenGPU() (*device.GPU, error) {
	if err := w.check("OpenGPU"); err != nil {
		return nil, err
	}
	list, err := device.List()
	if err != nil {
		return nil, err
	}
	ordinal := w.LocalRank
	if len(list) == 1 {
		ordinal = 0
	}
	return device.Open(ordinal)
}

// Part returns the share of this rank in n items: items [from, to). Shares differ by at most one item.
func (w World) Part(n int) (from, to int) { return w.Rank * n / w.Size, (w.Rank + 1) * n / w.Size }
