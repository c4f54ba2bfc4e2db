package gpu

import (
	"errors"
	"fmt"
	"time"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/cmd/leanbench/nvml"
)

// energyTurn is how long a contender runs for its energy: many times as long as the counter takes to move. It is
// a variable for tests.
var energyTurn = 1500 * time.Millisecond

// openNVML is a variable for tests, which have another library.
var openNVML = nvml.Open

// UseNVML has tests' counters of energy be of another library, and turns shorter, until what it returns is called.
func UseNVML(open func() (*nvml.Library, error), turn time.Duration) (restore func()) {
	o, t := openNVML, energyTurn
	openNVML, energyTurn = open, turn
	return func() { openNVML, energyTurn = o, t }
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

// Draw lets a contender run for a part of the usual time, behind OpenPower.
func (b *Bench) Draw(c *Contender, part float64) (d Drawn, err error) {
	turn := time.Duration(part * float64(energyTurn))
	if _, err := c.Replay(1); err != nil {
		return d, err
	}
	var times []float64
	var meter *nvml.Meter
	end := func() error {
		if meter == nil {
			return fmt.Errorf("%s: %v are too short for the counter of energy", c.Name, turn)
		}
		watts, err := meter.End()
		meter, d.Watts = nil, watts
		return err
	}
	for began := time.Now(); time.Since(began) < turn; {
		t, err := c.Replay(gpuMarks - 1)
		if err != nil {
			if meter != nil {
				end()
			}
			return d, err
		}
		times = append(times, t...)
		if meter == nil && time.Since(began) > turn/5 { // it is warm
			meter = b.power.device.Begin()
		}
	}
	if err := end(); err != nil {
		return d, err
	}
	d.Seconds = measure.Median(times)
	return d, nil
}

// addEnergy takes down what each contender of a case draws for what it reads.
func (b *Bench) addEnergy(c gpuCase, all []*Contender, ceilings int) error {
	for i, x := range all {
		if i > 0 && i < ceilings || isPeer(x.Name) && !countsAsBest(x.Name) {
			continue // one ceiling is enough
		}
		d, err := b.Draw(x, 1)
		if err != nil {
			return fmt.Errorf("%s: %w", x.Name, err)
		}
		name := x.Name
		if i < ceilings {
			name = measure.ReadCeiling
		}
		r := b.Report.Row(tableEnergy, c.shape.String(), name)
		r.Add(measure.Watts, d.Watts, nil)
		r.Add(measure.ByteJoules, 1e3*d.Joules()/(float64(c.shape.Bytes())/1e9), nil)
	}
	return nil
}

const tableEnergy = "Energy for what is read"
