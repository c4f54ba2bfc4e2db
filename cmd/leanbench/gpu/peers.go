package gpu

import (
	"gorgonia.org/leanattention/cmd/leanbench/measure"

	_ "embed"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

//go:embed gpu.py
var gpuWorker string

// peerNames are the ways that the worker may know.
var peerNames = map[string]string{
	"flash":            "PyTorch, FLASH_ATTENTION",
	"flash-varlen":     "PyTorch, FLASH_ATTENTION, varlen",
	"cudnn":            "PyTorch, CUDNN_ATTENTION",
	"flashinfer":       "FlashInfer, pages of 16",
	"flashinfer-tc":    "FlashInfer on tensor cores, pages of 16",
	"flashinfer-batch": "FlashInfer, BatchAttention, pages of 16",
	"flashinfer-plan":  "FlashInfer, with its plan",
	"flashinfer-paged": "FlashInfer, prefill in pages of 16",
	"cudnn-unmasked":   "PyTorch, CUDNN_ATTENTION without a mask",
	"cublas":           "PyTorch, cuBLAS",
}

func isPeer(name string) bool {
	for _, n := range peerNames {
		if n == name {
			return true
		}
	}
	return false
}

// countsAsBest says whether a peer may be the best: one that plans in every call
// does more than the others.
func countsAsBest(name string) bool { return isPeer(name) && name != peerNames["flashinfer-plan"] }

// PeerName is what reports call a way of the worker.
func PeerName(way string) string { return peerNames[way] }

// Peers are other programs on the same GPU, in another process. Nil is none.
type gpuPeers struct {
	worker *measure.Worker
	size   int64 // of their arena
	note   func(format string, args ...any)
	said   []string // which of them are missing for some shapes, and why
}

func (b *Bench) startPeers() (err error) {
	if !b.Options.Peers {
		b.Note("no peers, because of -peers=false")
		return nil
	}
	if b.peers, err = openPeers(b.Options.Python, b.Options.device, b.Report); err != nil {
		return fmt.Errorf("the peers do not start (-peers=false measures without, -python names another python): %w", err)
	}
	return nil
}

// openPeers starts the worker, and has a report say what it says of itself.
func openPeers(python string, device int, r *measure.Report) (*gpuPeers, error) {
	w, err := startGPUWorker(python, fmt.Sprint(device))
	if err != nil {
		return nil, err
	}
	note := func(format string, args ...any) { r.Notes = append(r.Notes, fmt.Sprintf(format, args...)) }
	hello := strings.Join(w.Hello, " ")
	note("%s", hello)
	for _, m := range versions.FindAllStringSubmatch(hello, -1) {
		setVersion(r, m[1], m[2])
	}
	return &gpuPeers{worker: w, note: note}, nil
}

// versions finds programs in what a worker says of itself.
var versions = regexp.MustCompile(`(PyTorch|CUDA|cuDNN|FlashInfer) ([^ ,]+)`)

// setVersion takes down that of a program.
func setVersion(r *measure.Report, name, is string) {
	if r.Versions == nil {
		r.Versions = make(map[string]string)
	}
	r.Versions[name] = is
}

// startGPUWorker is a variable for tests, which have another worker.
var startGPUWorker = func(python string, args ...string) (*measure.Worker, error) {
	return measure.StartWorker(python, gpuWorker, args...)
}

// UseWorker has tests' peers be another worker, until what it returns is called.
func UseWorker(start func(python string, args ...string) (*measure.Worker, error)) (restore func()) {
	old := startGPUWorker
	startGPUWorker = start
	return func() { startGPUWorker = old }
}

func (p *gpuPeers) close() error {
	if p == nil {
		return nil
	}
	return p.worker.Close()
}

func (p *gpuPeers) arena(bytes int64) error {
	if p == nil {
		return nil
	}
	p.size = bytes
	if p.worker.Gone {
		return nil // who comes in its place takes it
	}
	_, err := p.worker.Ask("arena %d", bytes)
	return err
}

// again starts a worker in place of one that is gone.
func (p *gpuPeers) again() error {
	w, err := p.worker.Again()
	if err != nil {
		return err
	}
	p.worker = w
	return p.arena(p.size)
}

// flashDecoding is how long FlashDecoding takes for a shape, alone, in memory that is given back behind it.
func (p *gpuPeers) flashDecoding(s Shape, rounds int) (_ measure.Samples, err error) {
	before := p.size
	defer func() { err = errors.Join(err, p.arena(before)) }()
	if err := p.arena(s.rotation()); err != nil {
		return nil, err
	}
	var flash []*Contender
	for _, c := range p.shape("sdpa", s) {
		if c.Name == peerNames["flash"] {
			flash = append(flash, c)
		}
	}
	if len(flash) == 0 {
		return nil, errors.New("it is not there")
	}
	times, err := Alternate(rounds, s.Launches(), flash)
	if err != nil {
		return nil, err
	}
	return times[0].Rounds, nil
}

// contenders have the worker capture its graphs for a shape. What it can't do is
// noted, each text once, and does not keep us from being measured.
func (p *gpuPeers) contenders(s Shape) (all []*Contender) { return p.shape("shape", s) }

func (p *gpuPeers) shape(word string, s Shape) (all []*Contender) {
	if p == nil {
		return nil
	}
	lengths := fmt.Sprintf("%dx%d", s.batch(), s.lengths[0])
	if !s.even() {
		lengths = strings.ReplaceAll(strings.Trim(fmt.Sprint(s.lengths), "[]"), " ", ",")
	}
	return p.ask(s.String(), word+" %d %d %d %d %d %s", s.heads, s.kvHeads, s.dim, s.Sets(), s.Launches(), lengths)
}

// prompts is the same for steps of many queries.
func (p *gpuPeers) prompts(c *prefillCase) []*Contender {
	if p == nil {
		return nil
	}
	causal := 0
	if c.causal {
		causal = 1
	}
	s := &c.shape
	return p.ask(c.String(), "prompts %d %d %d %d %d %dx%d %d", s.heads, s.kvHeads, s.dim, causal, c.queries[0], s.batch(), s.lengths[0], c.launches())
}

// linear is the same for linear layers of many rows.
func (p *gpuPeers) linear(c *linearCase) []*Contender {
	if p == nil {
		return nil
	}
	return p.ask(c.String(), "linear %d %d %d %d", c.rows, c.in, c.out, linearLayers)
}

// ask has the worker make its ways of what a question says. One that has ended in an earlier shape is started again.
func (p *gpuPeers) ask(is, format string, args ...any) (all []*Contender) {
	var err error
	if p.worker.Gone {
		err = p.again()
	}
	var words []string
	if err == nil {
		words, err = p.worker.Ask(format, args...)
	}
	if err != nil {
		if why := errors.Unwrap(err); why != nil {
			err = why // the question, which is in front, would make every text another one
		}
		reason, _, _ := strings.Cut(err.Error(), "\n")
		p.miss(is, "without the peers: %s", strings.TrimSuffix(reason, ":")) // stderr's end may follow
		return nil
	}
	ways := words
	if i := slices.Index(words, "without"); i >= 0 {
		ways = words[:i]
		p.miss(is, "%s", strings.Join(words[i:], " "))
	}
	for _, way := range ways {
		name, ok := peerNames[way]
		if !ok {
			p.miss(is, "without a way %q that the worker has", way)
			continue
		}
		all = append(all, &Contender{
			Name:   name,
			Replay: func(n int) ([]float64, error) { return p.replay(way, n) },
			close:  func() error { return nil },
		})
	}
	return all
}

// miss notes what is not measured.
func (p *gpuPeers) miss(is, format string, args ...any) {
	if text := fmt.Sprintf(format, args...); !slices.Contains(p.said, text) {
		p.said = append(p.said, text)
		p.note("%s%s%s", is, missing, text)
	}
}

// missing is between a shape and what it is measured without, in a note.
const missing = ", and perhaps others: "

// CutMissing finds in a note the first shape that is measured without something, and what that is.
func CutMissing(note string) (is, what string, ok bool) { return strings.Cut(note, missing) }

func (p *gpuPeers) replay(way string, n int) ([]float64, error) {
	words, err := p.worker.Ask("run %s %d", way, n)
	if err != nil {
		return nil, err
	}
	if len(words) != n {
		return nil, fmt.Errorf("the worker gives %d times of %d", len(words), n)
	}
	times := make([]float64, n)
	for i, s := range words {
		if times[i], err = strconv.ParseFloat(s, 64); err != nil {
			return nil, fmt.Errorf("the worker says %q: %w", words, err)
		}
		if !(times[i] > 0) {
			return nil, errors.New("the worker says that a launch takes no time")
		}
	}
	return times, nil
}
