package e2e

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/cmd/leanbench/gpu"
	"gorgonia.org/leanattention/cmd/leanbench/measure"

	la "gorgonia.org/leanattention"
	lean "gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/internal/nccl"
	"gorgonia.org/leanattention/ranks"
)

// Steps of a model that is split over several processes. Each process runs leanbench rank and answers
// questions over a pipe.

// startRank returns the command of a rank. Tests replace it.
var startRank = func(args ...string) (*exec.Cmd, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return exec.Command(self, append([]string{"rank"}, args...)...), nil
}

// leftOut is the reason why a measurement is left out.
type leftOut string

func (e leftOut) Error() string { return string(e) }

// rankSet is a set of ranks that share a model with random weights. The ranks are started on first use, and
// again after a failure of a rank.
type rankSet struct {
	gpu.Ranks
	shape   shape
	have    int // GPUs of this machine
	stderr  io.Writer
	nccl    string // NCCL version that the ranks reported
	workers []*measure.Worker
}

// start starts the ranks, which connect to each other and load the model.
func (s *rankSet) start() error {
	if s.workers != nil {
		return nil
	}
	if need := s.Size * s.GPUs; s.have < need {
		return leftOut(fmt.Sprintf("%d GPUs are needed, and there are %d", need, s.have))
	}
	port, err := freePort()
	if err != nil {
		return err
	}
	s.workers = make([]*measure.Worker, s.Size)
	_, err = s.each(func(rank int) ([]string, error) {
		var ordinals []string
		for i := range s.GPUs {
			ordinals = append(ordinals, strconv.Itoa(rank*s.GPUs+i))
		}
		c, err := startRank("-gpus", strings.Join(ordinals, ","))
		if err != nil {
			return nil, err
		}
		if c.Env == nil {
			c.Env = os.Environ()
		}
		c.Env = append(c.Env, "RANK="+strconv.Itoa(rank), "LOCAL_RANK="+strconv.Itoa(rank), "WORLD_SIZE="+strconv.Itoa(s.Size),
			"MASTER_ADDR=127.0.0.1", "LEANATTENTION_MASTER_PORT="+port, "LEANATTENTION_RANKS_TIMEOUT=2m") // the timeout ends the wait for a rank that failed before it connected
		if s.workers[rank], err = measure.Start(c); err != nil {
			return nil, err
		}
		return s.workers[rank].Hello, nil
	})
	if err != nil {
		return err
	}
	s.nccl = strings.Join(s.workers[0].Hello, " ")
	fmt.Fprintf(s.stderr, "%v: NCCL %s\n", s.Ranks, s.nccl)
	_, err = s.ask("model %s", s.shape.json())
	return err
}

// freePort returns a port without a listener at the time of the call.
func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, err
}

// each calls f for all ranks in parallel. After an error all ranks are closed.
func (s *rankSet) each(f func(rank int) ([]string, error)) ([][]string, error) {
	answers, errs := make([][]string, s.Size), make([]error, s.Size)
	var wait sync.WaitGroup
	for rank := range s.Size {
		wait.Go(func() { answers[rank], errs[rank] = f(rank) })
	}
	wait.Wait()
	var why error
	for rank, words := range answers {
		if len(words) > 0 && words[0] == "without" {
			why = leftOut(fmt.Sprintf("rank %d: %s", rank, strings.Join(words[1:], " ")))
		}
	}
	if why == nil {
		why = errors.Join(errs...)
	}
	if why == nil {
		return answers, nil
	}
	if err := s.close(); err != nil && !errors.As(why, new(leftOut)) { // a rank that gives up also ends the other ranks
		why = errors.Join(why, err)
	}
	return nil, why
}

// ask asks all ranks the same question.
func (s *rankSet) ask(format string, args ...any) ([][]string, error) {
	if err := s.start(); err != nil {
		return nil, err
	}
	return s.each(func(rank int) ([]string, error) { return s.workers[rank].Ask(format, args...) })
}

// took parses the answers to a timed question. It returns the time of the slowest rank, which is the first
// word, and the remaining words of rank 0.
func took(answers [][]string, err error) (time.Duration, []string, error) {
	var most float64
	for _, words := range answers {
		if len(words) == 0 {
			return 0, nil, errors.New("a rank tells no time")
		}
		seconds, e := strconv.ParseFloat(words[0], 64)
		if e != nil {
			return 0, nil, fmt.Errorf("a rank says %q: %w", words, e)
		}
		most = max(most, seconds)
	}
	if err != nil {
		return 0, nil, err
	}
	return time.Duration(most * float64(time.Second)), answers[0][1:], nil
}

func (s *rankSet) read(batch, context, steps int) error {
	if err := s.start(); err != nil {
		return err
	}
	_, err := s.ask("read %d %d %d", batch, context, steps)
	return err
}

func (s *rankSet) decode(batch, context, steps int) (_, steady time.Duration, ids []string, err error) {
	steady, ids, err = took(s.ask("steps %d %d %d", batch, context, steps))
	return 0, steady, ids, err
}

func (s *rankSet) again(times int) (time.Duration, error) {
	all, _, err := took(s.ask("again %d", times))
	return all, err
}

// rest makes the ranks release the memory of their prompts.
func (s *rankSet) rest() error {
	if s.workers == nil {
		return nil
	}
	_, err := s.ask("forget")
	return err
}

// close ends the ranks.
func (s *rankSet) close() error {
	errs := make([]error, len(s.workers))
	var wait sync.WaitGroup
	for rank, w := range s.workers {
		if w != nil {
			wait.Go(func() { errs[rank] = w.Close() })
		}
	}
	wait.Wait()
	s.workers = nil
	return errors.Join(errs...)
}

// rankCommand runs a rank.
func rankCommand(flags *flag.FlagSet) func(stdout, stderr io.Writer) error {
	gpus := flags.String("gpus", "0", "`numbers` of this rank's GPUs, with commas between")
	return func(stdout, _ io.Writer) error {
		var ordinals []int
		for _, text := range measure.Fields(*gpus) {
			n, err := strconv.Atoi(text)
			if err != nil {
				return fmt.Errorf("-gpus: %q is no number", text)
			}
			ordinals = append(ordinals, n)
		}
		return serveRank(ordinals, os.Stdin, stdout)
	}
}

// serveRank joins the ranks that the environment describes and answers questions until in ends.
func serveRank(ordinals []int, in io.Reader, out io.Writer) (err error) {
	r := &rankServer{}
	defer func() {
		if r.comm != nil && err != nil {
			r.comm.Fail(err)
		}
		err = errors.Join(err, r.close())
	}()
	answer := func(words string, err error) error {
		switch {
		case err == nil:
			_, err = fmt.Fprintln(out, strings.TrimSpace("ok "+words))
			return err
		case errors.Is(err, la.ErrOutOfMemory), errors.Is(err, la.ErrUnsupported):
			fmt.Fprintln(out, "ok without", oneLine(err))
		default:
			fmt.Fprintln(out, "error", oneLine(err))
		}
		return err
	}
	if err := answer(r.join(ordinals)); err != nil {
		return err
	}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		question, rest, _ := strings.Cut(lines.Text(), " ")
		if err := answer(r.do(question, rest)); err != nil {
			return err
		}
	}
	return lines.Err()
}

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// rankServer is the state of a rank.
type rankServer struct {
	gpu    *device.GPU
	comm   *ranks.Comm
	engine *leanEngine
}

func (r *rankServer) join(ordinals []int) (hello string, err error) {
	world, err := ranks.Environment()
	if err != nil {
		return "", err
	}
	if r.gpu, err = device.Open(ordinals...); err != nil {
		return "", err
	}
	if r.comm, err = ranks.Join(context.Background(), r.gpu, world); err != nil {
		return "", err
	}
	if world.Size == 1 { // a single rank needs no NCCL
		return "", nil
	}
	lib, err := nccl.Load()
	if err != nil {
		return "", err
	}
	return lib.Version(), nil
}

// do answers a question.
func (r *rankServer) do(question, rest string) (string, error) {
	if question == "model" {
		return "", r.load(rest)
	}
	if r.engine == nil {
		return "", fmt.Errorf("%q before there is a model", question)
	}
	var n []int
	for _, text := range strings.Fields(rest) {
		i, err := strconv.Atoi(text)
		if err != nil {
			return "", err
		}
		n = append(n, i)
	}
	switch {
	case question == "forget" && len(n) == 0:
		return "", r.engine.forget()
	case question == "read" && len(n) == 3:
		return "", r.engine.read(n[0], n[1], n[2])
	case question == "steps" && len(n) == 3:
		if err := r.comm.Barrier(); err != nil { // the ranks received the question at different times
			return "", err
		}
		_, steady, ids, err := r.engine.decode(n[0], n[1], n[2])
		return fmt.Sprint(steady.Seconds(), " ", strings.Join(ids, " ")), err
	case question == "again" && len(n) == 1:
		if err := r.comm.Barrier(); err != nil {
			return "", err
		}
		took, err := r.engine.again(n[0])
		return fmt.Sprint(took.Seconds()), err
	}
	return "", fmt.Errorf("what is %q?", question+" "+rest)
}

// load makes the rank's part of the weights.
func (r *rankServer) load(text string) error {
	n, err := lean.ReadNetwork([]byte(text), 0)
	if err != nil {
		return err
	}
	r.engine = newRandom(n, newRandomWeights(n), lean.Options{Device: r.gpu, Cache: la.Float16, Exact: true, Ranks: r.comm})
	return nil
}

func (r *rankServer) close() (err error) {
	if r.engine != nil {
		err = r.engine.close()
	}
	if r.comm != nil {
		err = errors.Join(err, r.comm.Close())
	}
	if r.gpu != nil {
		err = errors.Join(err, r.gpu.Close())
	}
	return err
}

// rankSets returns the sets of ranks that the scale command's flags ask for.
func rankSets(x *gpu.Scaled, of shape) (all []*rankSet, err error) {
	if len(x.Ranks) == 0 {
		return nil, nil
	}
	list, err := device.List()
	for _, r := range x.Ranks {
		all = append(all, &rankSet{Ranks: r, shape: of, have: len(list), stderr: x.Stderr})
	}
	return all, err
}
