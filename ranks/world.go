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

// World is which of several processes this one is.
type World struct {
	Rank      int    // among all processes, from 0
	Size      int    // how many there are
	LocalRank int    // among those of this host, from 0: the ordinal of its GPU, if it has one
	Address   string // host:port at which rank 0 listens

	// Job names the job that this process is a part of, in up to 128 bytes. Rank 0 turns processes away whose Job is
	// another one, and goes on waiting. Without names, a rank of another job that comes to this Address ends both jobs.
	Job string

	// Timeout is how long the others are waited for: until they have come, at a barrier, and
	// for a collective. 0: five minutes.
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

// Environment is the world as the environment has it, from RANK, WORLD_SIZE, LOCAL_RANK,
// MASTER_ADDR and MASTER_PORT, which torchrun and Kubernetes' training operators set. Under
// Slurm srun's SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID have the first three. Without
// RANK and WORLD_SIZE this process is alone: rank 0 of 1.
//
// LOCAL_RANK is 0 if it is not set. Under torchrun, whose agent listens at MASTER_PORT itself
// (TORCHELASTIC_USE_AGENT_STORE is True), the port is the next one. LEANATTENTION_MASTER_PORT
// says another; LEANATTENTION_RANKS_TIMEOUT is World.Timeout, as "90s". LEANATTENTION_JOB is World.Job, and if it is not
// set, torchrun's TORCHELASTIC_RUN_ID is.
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

// device.Open opens this rank's GPU: that of the ordinal LocalRank, or the only one that the
// process sees (launchers may show each its own). Several are opened by [device.Open]. Errors are those of [device.Open].
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

// Part is which of n things rank r has: those from `from` up to `to`. Each has as many, but for one.
func (w World) Part(n int) (from, to int) { return w.Rank * n / w.Size, (w.Rank + 1) * n / w.Size }
