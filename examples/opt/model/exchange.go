package model

import (
	"errors"
	"slices"
	"time"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Exchange describes the sums of a run of decode over the GPUs, or ranks, of a model.
type Exchange struct {
	Sums  int           // sums of all layers; 0: none
	Bytes int           // bytes of each sum
	Time  time.Duration // time of all sums by themselves
}

// MeasureExchange measures sums of that size, one after the other, recorded and replayed some times, so that no step
// is disturbed. Within a step a sum may take less, as a part of the launch that makes its operands in a step of few
// rows, or more, if a GPU or rank is late. Gathers and merges of attention by context are not included. All ranks
// have to call MeasureExchange. There is nothing to measure with one GPU, or if heads and features do not divide
// evenly.
func (d *Decoder) MeasureExchange() (x Exchange, err error) {
	o, rows, width := &d.options, len(d.lengths), d.config.HiddenSize
	if o.Device == nil {
		return x, nil
	}
	within := len(o.Device.Members()) > 1 && evenly(&d.config, o.world(), len(o.Device.Members()))
	if !within && o.world().Size == 1 {
		return x, nil
	}
	x.Sums, x.Bytes = 2*d.config.Layers, rows*width*4
	upload := o.Device.Upload
	if within {
		upload = o.Device.UploadReplicated
	}
	there, err := upload(tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(rows, width)))
	if err != nil {
		return x, err
	}
	defer func() { err = errors.Join(err, there.Free()) }()
	call := func() *ongpu.Call {
		return &ongpu.Call{Op: "model.MeasureExchange", Node: new(ongpu.Node), Names: []string{"x"}, In: []G.Value{there}, DType: tensor.Float32, Shape: tensor.Shape{rows, width}}
	}
	var calls []*ongpu.Call
	if within { // a rank's GPUs, before the ranks
		c := call()
		c.PerGPU = func([]ongpu.Layout) (*ongpu.PerGPU, error) { // the sum of arbitrary memory
			return &ongpu.PerGPU{Layout: ongpu.Layout{Replicated: true}, Shape: c.Shape, Sum: true}, nil
		}
		calls = append(calls, c)
	}
	if o.world().Size > 1 {
		c := call()
		c.Queue = func(w *ongpu.Work) error { return o.Ranks.Internal().Queue(w, ongpu.Sum, rows*width, 0) }
		calls = append(calls, c)
	}
	sums := func(n int) error {
		for range n {
			for _, c := range calls {
				if _, err := ongpu.Compute(c); err != nil {
					return err
				}
			}
		}
		return nil
	}
	if err := sums(1); err != nil { // loads kernels
		return x, err
	}
	// A replay and waiting for it take as long for few sums as for many.
	const few, many, rounds = 8, 24, 9
	var took [2]time.Duration
	for i, n := range [...]int{few, many} {
		if took[i], err = replayed(o.Device, rounds, func() error { return sums(n) }); err != nil {
			return x, err
		}
	}
	x.Time = max(took[1]-took[0], 0) * time.Duration(x.Sums) / (many - few)
	return x, nil
}

// replayed returns the median time of some replays of the work that run queues.
func replayed(gpu *device.GPU, rounds int, run func() error) (took time.Duration, err error) {
	recording, err := gpu.Record(run)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, recording.Close()) }()
	var times []time.Duration
	for range rounds + 1 {
		began := time.Now()
		if err := errors.Join(recording.Replay(), gpu.Synchronize()); err != nil {
			return 0, err
		}
		times = append(times, time.Since(began))
	}
	times = times[1:] // the first replay uploads the graph
	slices.Sort(times)
	return times[rounds/2], nil
}
