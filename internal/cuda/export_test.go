package cuda

// Context is the handle of the device's context.
func (v *Device) Context() uintptr { return v.ctx }
