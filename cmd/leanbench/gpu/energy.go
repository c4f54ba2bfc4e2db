package gpu

import (
	"errors"
	"fmt"
	"time"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/cmd/leanbench/nvml"
)

// energyTurn is how long a contender runs for its energy in each of its turns: many times as long as the counter takes to
// move. energyTurns is how many it has. They are variables for tests.
var energyTurn, energyTurns = 500 * time.Millisecond, 4

// EnergySeconds is how long a contender runs for its energy, in all its turns.
func EnergySeconds() float64 { return energyTurn.Seconds() * float64(energyTurns) }

// openNVML is a variable for tests, which have another library.
var openNVML = nvml.Open

// UseNVML has tests' counters of energy be of another library, and fewer and shorter turns, until what it returns is called.
func UseNVML(open func() (*nvml.Library, error), turns int, turn time.Duration) (restore func()) {
	o, t, n := openNVML, energyTurn, energyTurns
	openNVML, energyTurn, energyTurns = open, turn, turns
	return func() { openNVML, energyTurn, energyTurns = o, t, n }
}

// power is a GPU's counter of energy.
type power struct {
	library *nvml.Library
	device  *nvml.Device
}

// OpenPower opens the GPU's counter of energy, which Close gives back. Without one there is an error.
func (b *Bench) OpenPower() error {
	library, err := openNVML()
	if err != nil {
		return err
	}
	info := b.Info()
	device, err := library.Device(info.Ordinal, info.Name)
	if err == nil {
		_, err = device.Energy()
	}
	if err != nil {
		return errors.Join(err, library.Close())
	}
	b.power = &power{library, device}
	return nil
}

func (p *power) close() error {
	if p == nil {
		return nil
	}
	return p.library.Close()
}

// Drawn is what a contender takes.
type Drawn struct{ Watts, Seconds float64 } // of the whole GPU, and of a launch

// Joules are those of a launch.
func (d Drawn) Joules() float64 { return d.Watts * d.Seconds }

// Draw has contenders take turns of a part of the usual time, behind OpenPower. Every other time they come in the opposite
// order: a GPU that becomes warmer draws more, and so it is as warm for all on average.
func (b *Bench) Draw(all []*Contender, part float64) ([]Drawn, error) {
	turn := time.Duration(part * float64(energyTurn))
	drawn, times := make([]Drawn, len(all)), make([][]float64, len(all))
	for n := range energyTurns {
		for i := range all {
			if n%2 == 1 {
				i = len(all) - 1 - i
			}
			watts, t, err := b.drawOnce(all[i], turn)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", all[i].Name, err)
			}
			drawn[i].Watts += watts / float64(energyTurns)
			times[i] = append(times[i], t...)
		}
	}
	for i := range drawn {
		drawn[i].Seconds = measure.Median(times[i])
	}
	return drawn, nil
}

// drawOnce lets a contender run for a turn: its power, and the seconds of its launches.
func (b *Bench) drawOnce(c *Contender, turn time.Duration) (watts float64, times []float64, err error) {
	var meter *nvml.Meter
	times, err = whileRunning(c, turn, func() error {
		meter = b.power.device.Begin()
		return nil
	})
	if meter != nil {
		w, failed := meter.End()
		watts, err = w, errors.Join(err, failed)
	}
	return watts, times, err
}

// Busy is which share of the multiprocessors' time has a warp while a contender runs, by the GPU's counters, behind OpenPower.
func (b *Bench) Busy(c *Contender) (share float64, err error) {
	var counters *nvml.Counters
	_, err = whileRunning(c, energyTurn*3/4, func() (err error) {
		counters, err = b.power.device.Count()
		return err
	})
	if counters != nil {
		use, failed := counters.End()
		share, err = use.SMs, errors.Join(err, failed)
	}
	if err != nil {
		return 0, fmt.Errorf("%s: %w", c.Name, err)
	}
	return share, nil
}

// whileRunning lets a contender run for a turn, and begins what is measured when it is warm. It returns the seconds of the launches.
func whileRunning(c *Contender, turn time.Duration, begin func() error) (times []float64, err error) {
	began := time.Now()
	if _, err := c.Replay(1); err != nil {
		return nil, err
	}
	// So many at once that a turn is not much longer than it should be: there were two.
	replays := max(1, min(gpuMarks-1, int(2*turn/5/max(1, time.Since(began)))))
	warm := false
	began = time.Now()
	for !warm || time.Since(began) < turn/5*4 {
		t, err := c.Replay(replays)
		if err != nil {
			return nil, err
		}
		times = append(times, t...)
		if !warm && time.Since(began) > turn/5 {
			if err := begin(); err != nil {
				return nil, err
			}
			warm, began = true, time.Now()
		}
	}
	return times, nil
}

// Metered are those of all contenders of a shape, the ceilings first, whose energy is measured: one ceiling is enough,
// and who plans in every call does more than attention.
func Metered(all []*Contender, ceilings int) (some []*Contender) {
	for i, x := range all {
		if i == 0 || i >= ceilings && (!isPeer(x.Name) || countsAsBest(x.Name)) {
			some = append(some, x)
		}
	}
	return some
}

// MeteredName is what reports call the one of them with a number.
func MeteredName(some []*Contender, i, ceilings int) string {
	if i == 0 && ceilings > 0 {
		return measure.ReadCeiling
	}
	return some[i].Name
}

// addEnergy takes down what each contender of a case draws for what it reads.
func (b *Bench) addEnergy(c gpuCase, all []*Contender, ceilings int) error {
	some := Metered(all, ceilings)
	drawn, err := b.Draw(some, 1)
	if err != nil {
		return err
	}
	for i, d := range drawn {
		r := b.Report.Row(tableEnergy, c.shape.String(), MeteredName(some, i, ceilings))
		r.Add(measure.Watts, d.Watts, nil)
		r.Add(measure.ByteJoules, 1e3*d.Joules()/(float64(c.shape.Bytes())/1e9), nil)
		if ceilings > 0 {
			r.Add(measure.OfReadJoules, d.Joules()/drawn[0].Joules(), nil)
		}
	}
	return nil
}

const tableEnergy = "Energy for what is read"
